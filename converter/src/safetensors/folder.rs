//! Which files of a folder are the checkpoint: weights, index, configuration, tokenizer.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::error::SafetensorsError as Error;
use super::header::StringPairs;
use crate::source::SourceFile;

/// Largest index, configuration or tokenizer file that is read.
const MAX_SMALL_FILE: u64 = 256 << 20;

/// The index that the hub's tools write.
const INDEX: &str = "model.safetensors.index.json";
const INDEX_SUFFIX: &str = ".safetensors.index.json";

/// Small files that are kept with the checkpoint when they exist, in this order.
const SMALL_FILES: [&str; 14] = [
    "config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
];

/// The files of a checkpoint, before any is opened.
#[derive(Debug)]
pub(crate) struct Listing {
    pub folder: PathBuf,
    /// Weight files in the order in which they are read.
    pub weights: Vec<String>,
    /// The index, if there is one.
    pub index: Option<Index>,
    /// Small files that exist, in a fixed order.
    pub small: Vec<&'static str>,
    pub warnings: Vec<String>,
}

/// A parsed `*.safetensors.index.json`.
#[derive(Debug)]
pub(crate) struct Index {
    pub name: String,
    /// Tensor name to file name.
    pub weight_map: HashMap<String, String>,
}

/// Lists the checkpoint at `input`: a folder, or one `.safetensors` file of a folder.
pub(crate) fn list(input: &Path) -> Result<Listing, Error> {
    let meta = follow(input)?;
    let (folder, single) = if meta.is_dir() {
        (input.to_path_buf(), None)
    } else {
        let name = input.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let parent = input.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        (parent.to_path_buf(), Some(name))
    };

    let mut names = BTreeSet::new();
    for entry in fs::read_dir(&folder).map_err(Error::io(&folder, "list the folder"))? {
        let entry = entry.map_err(Error::io(&folder, "list the folder"))?;
        // A name that is not UTF-8 can be none of the files that are looked for.
        if let Ok(name) = entry.file_name().into_string() {
            names.insert(name);
        }
    }

    let small = SMALL_FILES.into_iter().filter(|n| names.contains(*n)).collect();
    let mut listing = Listing { folder, weights: Vec::new(), index: None, small, warnings: Vec::new() };
    let index_name = match single {
        Some(ref name) => index_of(&listing.folder, &names, name)?,
        None => choose_index(&names),
    };
    match (index_name, single) {
        (Some(name), _) => {
            let index = read_index(&listing.folder, name)?;
            let shards: BTreeSet<&String> = index.weight_map.values().collect();
            let missing: Vec<String> = shards.iter().filter(|s| !names.contains(**s)).map(|s| s.to_string()).collect();
            if !missing.is_empty() {
                let index = listing.folder.join(&index.name);
                return Err(Error::MissingShards { index, missing, total: shards.len() });
            }
            listing.weights = shards.into_iter().cloned().collect();
            listing.index = Some(index);
        }
        (None, Some(name)) => listing.weights = vec![name],
        (None, None) => listing.weights = weights_without_index(&listing.folder, &names)?,
    }
    let ignored: Vec<&str> = names
        .iter()
        .filter(|n| n.ends_with(".safetensors") && !listing.weights.contains(n))
        .map(String::as_str)
        .collect();
    if !ignored.is_empty() {
        let why = match &listing.index {
            Some(index) => format!("{} does not list it", index.name),
            None => format!("the model is in {}", listing.weights.join(", ")),
        };
        listing.warnings.push(format!("left out: {} ({why})", ignored.join(", ")));
    }
    Ok(listing)
}

fn choose_index(names: &BTreeSet<String>) -> Option<String> {
    if names.contains(INDEX) {
        return Some(INDEX.into());
    }
    let mut others = names.iter().filter(|n| n.ends_with(INDEX_SUFFIX));
    let first = others.next()?;
    others.next().is_none().then(|| first.clone())
}

/// The index that maps tensors to the file `name`, when that file alone was given as the input.
fn index_of(folder: &Path, names: &BTreeSet<String>, name: &str) -> Result<Option<String>, Error> {
    let Some(index) = choose_index(names) else { return Ok(None) };
    let lists_it = read_index(folder, index.clone())?.weight_map.values().any(|file| file == name);
    Ok(lists_it.then_some(index))
}

fn weights_without_index(folder: &Path, names: &BTreeSet<String>) -> Result<Vec<String>, Error> {
    let weights: Vec<&String> = names.iter().filter(|n| n.ends_with(".safetensors")).collect();
    if names.contains("model.safetensors") {
        return Ok(vec!["model.safetensors".into()]);
    }
    if weights.is_empty() {
        let pickle = names.iter().find(|n| {
            let n = n.to_ascii_lowercase();
            n.ends_with(".bin") && !n.starts_with("training_args") || n.ends_with(".pt") || n.ends_with(".pth")
        });
        return Err(match pickle {
            Some(file) => Error::OnlyPickle { folder: folder.into(), file: file.clone() },
            None => Error::NoWeights { folder: folder.into() },
        });
    }
    // Numbered shards (`model-00001-of-00005.safetensors`) tell how many there must be.
    let mut sets: BTreeMap<(&str, u32), BTreeSet<u32>> = BTreeMap::new();
    for name in &weights {
        if let Some((prefix, number, total)) = shard_number(name) {
            sets.entry((prefix, total)).or_default().insert(number);
        }
    }
    let numbered: Vec<_> = match sets.iter().find(|((prefix, _), _)| *prefix == "model") {
        Some(set) => vec![set],
        None => sets.iter().collect(),
    };
    match numbered[..] {
        [] => Ok(weights.into_iter().cloned().collect()),
        [((prefix, total), numbers)] => {
            let file = |n: u32| format!("{prefix}-{n:05}-of-{total:05}.safetensors");
            // At most as many names as there are files are built here, whatever number a name claims.
            let present = numbers.len();
            if *total as usize != present {
                let missing =
                    (1..=*total).filter(|n| !numbers.contains(n)).take(present.max(64)).map(file).collect::<Vec<_>>();
                return Err(Error::MissingShards { index: folder.into(), missing, total: *total as usize });
            }
            Ok(numbers.iter().map(|&n| file(n)).collect())
        }
        _ => Err(Error::AmbiguousWeights {
            folder: folder.into(),
            sets: numbered.iter().map(|((prefix, total), _)| format!("{prefix}-*-of-{total:05}")).collect(),
        }),
    }
}

/// Splits `PREFIX-00001-of-00005.safetensors` into prefix, number and total, number within 1..=total.
fn shard_number(name: &str) -> Option<(&str, u32, u32)> {
    let stem = name.strip_suffix(".safetensors")?;
    let (rest, total) = stem.rsplit_once("-of-")?;
    let (prefix, number) = rest.rsplit_once('-')?;
    let five_digits = |s: &str| (s.len() == 5).then(|| s.parse::<u32>().ok()).flatten();
    let (number, total) = (five_digits(number)?, five_digits(total)?);
    (1..=total).contains(&number).then_some((prefix, number, total))
}

fn read_index(folder: &Path, name: String) -> Result<Index, Error> {
    #[derive(Deserialize)]
    struct RawIndex {
        weight_map: StringPairs,
    }
    let path = folder.join(&name);
    let file = open_file(folder, &name)?;
    check_small(&file)?;
    let raw: RawIndex = serde_json::from_slice(file.bytes())
        .map_err(|e| Error::Json { path: path.clone(), reason: format!("not a valid index: {e}") })?;
    let mut weight_map = HashMap::with_capacity(raw.weight_map.0.len());
    for (tensor, file) in raw.weight_map.0 {
        if !is_plain_name(&file) || !file.ends_with(".safetensors") {
            return Err(Error::IndexName { index: path, tensor, file });
        }
        if weight_map.contains_key(&tensor) {
            return Err(Error::DuplicateKey { path, name: tensor });
        }
        weight_map.insert(tensor, file);
    }
    if weight_map.is_empty() {
        return Err(Error::Json { path, reason: "weight_map is empty; expected a file for every tensor".into() });
    }
    Ok(Index { name, weight_map })
}

/// Whether `name` stays in the folder by its letters alone (links are another matter, and allowed).
fn is_plain_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', '\0', ':'])
}

/// Opens and maps `name` in `folder`, following links.
pub(crate) fn open_file(folder: &Path, name: &str) -> Result<SourceFile, Error> {
    let path = folder.join(name);
    let meta = follow(&path)?;
    if !meta.is_file() {
        return Err(Error::NotAFile { path });
    }
    let resolved = fs::canonicalize(&path).map_err(Error::io(&path, "resolve"))?;
    let file = File::open(&resolved).map_err(Error::io(&path, "open"))?;
    let map = vt_bundle::mmap::map_readonly(&file).map_err(Error::io(&path, "map"))?;
    let size = map.as_ref().map_or(0, |m| m.len() as u64);
    Ok(SourceFile { name: name.into(), path: resolved, size, map })
}

/// Refuses a small file that is not small.
pub(crate) fn check_small(file: &SourceFile) -> Result<(), Error> {
    if file.size > MAX_SMALL_FILE {
        return Err(Error::TooLarge { path: file.path.clone(), size: file.size, limit: MAX_SMALL_FILE });
    }
    Ok(())
}

/// `stat` that tells a dangling link from a missing file.
fn follow(path: &Path) -> Result<fs::Metadata, Error> {
    fs::metadata(path).map_err(|e| {
        if e.kind() == io::ErrorKind::NotFound
            && let Ok(target) = fs::read_link(path)
        {
            return Error::DanglingLink { link: path.into(), target };
        }
        Error::Io { path: path.into(), action: "open", source: e }
    })
}
