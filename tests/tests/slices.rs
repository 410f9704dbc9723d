//! `vt-bundle slice-plan`: the ranks together are the image, and impossible degrees are refused with the numbers.

use std::path::{Path, PathBuf};

use serde_json::Value;
use vt_tests::fixtures;
use vt_tests::process::{Ran, run};

fn bundle(name: &str, root: &Path) -> PathBuf {
    fixtures::make_tiny(root, &[name]);
    let bundle = root.join("bundle");
    run("vt-convert", &[root.join(name), bundle.clone()]).ok();
    bundle
}

fn plan(bundle: &Path, degree: u64, more: &[&str]) -> Ran {
    let degree = degree.to_string();
    let mut args = vec!["slice-plan", bundle.to_str().expect("text"), "--tp", degree.as_str()];
    args.extend(more);
    run("vt-bundle", &args)
}

/// Adds one rank's ranges to how often each byte of the image is read.
fn count(rank: &Value, inspected: &Value, reads: &mut [u8]) -> u64 {
    let mut bytes = 0;
    for tensor in rank["tensors"].as_array().expect("tensors") {
        let described = inspected["tensors"].as_array().expect("tensors").iter().find(|t| t["name"] == tensor["name"]);
        let stride = described.expect("in the manifest")["experts"]["stride"].as_u64().unwrap_or(0);
        for plane in tensor["planes"].as_array().expect("planes") {
            for run in plane["runs"].as_array().expect("runs") {
                let number = |key: &str| run[key].as_u64().expect("number");
                for expert in 0..tensor["experts"].as_u64().expect("number") {
                    for i in 0..number("count") {
                        let at = (number("offset") + i * number("stride") + expert * stride) as usize;
                        reads[at..at + number("len") as usize].iter_mut().for_each(|r| *r += 1);
                        bytes += number("len");
                    }
                }
            }
        }
    }
    bytes
}

#[test]
fn ranks_together_are_the_image() {
    let root = tempfile::tempdir().expect("temporary folder");
    let bundle = bundle("bf16", root.path());
    let args = ["inspect".as_ref(), bundle.as_os_str(), "--json".as_ref(), "--tensors".as_ref()];
    let inspected = run("vt-bundle", &args).ok().json();
    // Two key and value heads: four ranks share them in pairs.
    for degree in [1, 2, 4] {
        let planned = plan(&bundle, degree, &["--json"]).ok().json();
        let mut reads = vec![0; inspected["image"]["size"].as_u64().expect("size") as usize];
        let mut total = 0;
        for rank in planned["ranks"].as_array().expect("ranks") {
            let bytes = count(rank, &inspected, &mut reads);
            assert_eq!(rank["bytes"].as_u64(), Some(bytes));
            total += bytes;
        }
        let image = planned["image_bytes"].as_u64().expect("bytes");
        assert_eq!(planned["extra_bytes"].as_u64(), Some(total - image));
        for tensor in inspected["tensors"].as_array().expect("tensors") {
            let name = tensor["name"].as_str().expect("name");
            let replicated = planned["replicated"].as_array().expect("list").iter().any(|r| r[0] == name);
            for plane in tensor["planes"].as_array().expect("planes") {
                let at = plane["offset"].as_u64().expect("offset") as usize;
                let reads = &reads[at..at + plane["size"].as_u64().expect("size") as usize];
                let expected = |r: &u8| match (replicated, degree, name.contains("qkv_proj")) {
                    (true, _, _) => u64::from(*r) == degree,
                    (false, 4, true) => (1..=2).contains(r),
                    _ => *r == 1,
                };
                assert!(reads.iter().all(expected), "degree {degree}, {name}");
            }
        }
    }
}

#[test]
fn impossible_degrees_are_refused_with_the_numbers() {
    let root = tempfile::tempdir().expect("temporary folder");
    let bundle = bundle("nvfp4", root.path());
    plan(&bundle, 1, &[]).ok();
    // 352 inner rows over two ranks are 176: two tiles and three quarters.
    let tiles = plan(&bundle, 2, &[]).exits(2);
    assert!(tiles.err.contains("352") && tiles.err.contains("176") && tiles.err.contains("64"), "{tiles:?}");
    let parts = plan(&bundle, 3, &[]).exits(2);
    assert!(parts.err.contains("117.33"), "{parts:?}");
    plan(&bundle, 1, &["--rank", "1"]).exits(2);
    let ranges = plan(&bundle, 1, &["--rank", "0"]).ok();
    assert!(ranges.out.contains("model.layers.1.mlp.down_proj.weight"), "{ranges:?}");
}

#[test]
fn heads_stay_whole() {
    let root = tempfile::tempdir().expect("temporary folder");
    // Without tiles, eight ranks fail at the four query heads.
    let refused = plan(&bundle("bf16", root.path()), 8, &[]).exits(2);
    assert!(refused.err.contains("4 query heads") && refused.err.contains("8 ranks"), "{refused:?}");
}
