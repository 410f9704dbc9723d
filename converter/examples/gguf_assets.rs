//! Writes the assets that a GGUF file gives (tokenizer, templates, configuration) into a folder: for comparing tokenizers.
//!
//! usage: gguf_assets MODEL.gguf FOLDER

use std::path::Path;

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args_os().skip(1);
    let (Some(model), Some(folder)) = (arguments.next(), arguments.next()) else {
        anyhow::bail!("usage: gguf_assets MODEL.gguf FOLDER");
    };
    let folder = Path::new(&folder);
    let (checkpoint, _) = vt_convert::gguf::open(Path::new(&model))?;
    for warning in &checkpoint.warnings {
        eprintln!("warning: {warning}");
    }
    let config = serde_json::to_vec_pretty(&checkpoint.config)?;
    for (name, bytes) in checkpoint.assets.iter().chain([&("config.json".to_owned(), config)]) {
        let path = folder.join(name);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)?;
        }
        std::fs::write(path, bytes)?;
    }
    Ok(())
}
