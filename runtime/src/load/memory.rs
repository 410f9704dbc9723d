//! How much memory this process may still use.

use std::path::Path;

/// Bytes that can be allocated without swapping or being killed: what the machine has available, or what is left of
/// the memory limit of the process's control group, whichever is less. `None` where the system does not say.
pub fn available_memory() -> Option<u64> {
    let machine = meminfo(&std::fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable");
    let group =
        group_left(Path::new("/sys/fs/cgroup"), &std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default());
    match (machine, group) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// A value of `/proc/meminfo`, in bytes.
fn meminfo(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// What is left of the tightest limit on the way from the process's group to the root. Pages of files in the cache count
/// as free, as the kernel drops them first. Version 2 and version 1 of the interface.
fn group_left(root: &Path, own: &str) -> Option<u64> {
    let mut least = None;
    for line in own.lines() {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let names = match controllers {
            "" => (root.to_owned(), "memory.max", "memory.current", "inactive_file"),
            c if c.split(',').any(|c| c == "memory") => {
                (root.join("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            }
            _ => continue,
        };
        let (base, limit_file, usage_file, cache_key) = names;
        let mut group = base.join(path.trim_start_matches('/'));
        // Inside a container the path may be the host's; then only the mount's root exists.
        loop {
            if let Some(left) = left_of(&group, limit_file, usage_file, cache_key) {
                least = Some(least.map_or(left, |l: u64| l.min(left)));
            }
            if group == base || !group.pop() || !group.starts_with(&base) {
                break;
            }
        }
    }
    least
}

fn left_of(group: &Path, limit_file: &str, usage_file: &str, cache_key: &str) -> Option<u64> {
    let number = |file: &str| std::fs::read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok();
    // No limit is `max` in version 2 and a number near 2^63 in version 1.
    let limit = number(limit_file).filter(|&l| l < 1 << 62)?;
    let cache = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let cache = cache.lines().find_map(|l| l.strip_prefix(cache_key)?.trim().parse::<u64>().ok()).unwrap_or(0);
    Some(limit.saturating_sub(number(usage_file)?.saturating_sub(cache)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_in_bytes() {
        let text = "MemTotal:       1000 kB\nMemAvailable:    500 kB\nMemAvailableX:  1 kB\n";
        assert_eq!(meminfo(text, "MemAvailable"), Some(512_000));
        assert_eq!(meminfo(text, "SwapFree"), None);
    }

    #[test]
    fn the_tightest_group_decides() {
        let root = tempfile::tempdir().unwrap();
        let group = root.path().join("a/b");
        std::fs::create_dir_all(&group).unwrap();
        let write = |path: &str, text: &str| std::fs::write(root.path().join(path), text).unwrap();
        write("a/b/memory.max", "max\n");
        write("a/b/memory.current", "10\n");
        assert_eq!(group_left(root.path(), "0::/a/b\n"), None);
        write("a/memory.max", "1000\n");
        write("a/memory.current", "700\n");
        write("a/memory.stat", "anon 1\ninactive_file 200\n");
        assert_eq!(group_left(root.path(), "0::/a/b\n"), Some(500));
        write("a/b/memory.max", "100\n");
        assert_eq!(group_left(root.path(), "0::/a/b\n"), Some(90));
        assert_eq!(group_left(root.path(), "0::/elsewhere\n"), None);
    }

    #[test]
    fn version_one_names() {
        let root = tempfile::tempdir().unwrap();
        let group = root.path().join("memory/x");
        std::fs::create_dir_all(&group).unwrap();
        std::fs::write(group.join("memory.limit_in_bytes"), "100").unwrap();
        std::fs::write(group.join("memory.usage_in_bytes"), "40").unwrap();
        assert_eq!(group_left(root.path(), "5:cpu:/x\n4:memory:/x\n"), Some(60));
    }
}
