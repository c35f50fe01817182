//! Facts of the host's processor, from `/proc/cpuinfo`.

use std::fs;

/// Returns the value of the first line named `name`, of the first CPU.
fn field(name: &str) -> Option<String> {
    let info = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|line| line.starts_with(name))?;
    line.split_once(':').map(|(_, value)| value.trim().to_owned())
}

/// Returns the model name.
pub fn model() -> String {
    field("model name").unwrap_or_else(|| "an unknown processor".to_owned())
}

/// Returns whether the host is a virtual machine: the processor's flag for a hypervisor (cpuid leaf
/// 1) is set.
pub fn is_virtual() -> bool {
    field("flags").is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor"))
}
