//! A stock Linux kernel for the same program, in the same QEMU.
//!
//! The program is the kernel's first process (`/init`), alone in its file system: the program
//! mounts the file systems it needs and turns the machine off at its end. Debian's kernel packages
//! are downloaded and unpacked, but never installed.

use crate::accel::Accel;
use crate::error::BootError;
use crate::initrd::Initrd;
use crate::machine::{Program, archive, temporary_of};
use crate::nodes::Nodes;
use crate::qemu::{Clock, Cut, Drive, DriveUse, Input, Limits, Qemu, Streams};
use std::env;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// The Linux release for comparisons.
pub const RELEASE: &str = "6.12";
/// The suffix of Debian's kernel names.
const FLAVOUR: &str = "-amd64";
/// The drivers that a kernel needs to read a virtio disk, in the order of their dependencies.
/// Debian's image contains all except the last.
const DRIVERS: [&str; 6] = [
    "virtio",
    "virtio_ring",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_blk",
];
/// The suffixes of module files; the kernel itself decompresses modules.
const MODULE: [&str; 3] = [".ko", ".ko.xz", ".ko.zst"];

/// A kernel's image, and its drivers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stock {
    /// The name, such as `6.12.117+deb12-amd64`.
    pub name: String,
    /// The `bzImage`.
    pub image: PathBuf,
    /// The modules of [`DRIVERS`], in their order; empty for a kernel from a file.
    drivers: Vec<PathBuf>,
}

impl Stock {
    /// Returns a kernel from a file.
    pub fn file(image: &Path) -> Result<Self, BootError> {
        use std::io::Read;
        let mut head = Vec::new();
        let file = File::open(image).map_err(BootError::file(image))?;
        file.take(0x206).read_to_end(&mut head).map_err(BootError::file(image))?;
        if head.get(0x202..0x206) != Some(b"HdrS") {
            let why = "not a Linux kernel (a bzImage has \"HdrS\" at offset 0x202)";
            return Err(BootError::Unfit { path: image.into(), why });
        }
        let name = image.file_name().unwrap_or_default().to_string_lossy();
        let name = name.strip_prefix("vmlinuz-").unwrap_or(&name).to_owned();
        Ok(Self { name, image: image.into(), drivers: Vec::new() })
    }

    /// Returns whether the kernel can read a virtio disk.
    pub fn reads_disks(&self) -> bool {
        !self.drivers.is_empty()
    }

    /// Returns the kernel with the drivers that are next to it in the cache.
    fn with_drivers(mut self, cache: &Path) -> Self {
        let kept = |driver| {
            MODULE
                .map(|end| cache.join(self.kept(driver, end)))
                .into_iter()
                .find(|file| file.exists())
        };
        self.drivers = DRIVERS.iter().filter_map(|driver| kept(driver)).collect();
        self
    }

    /// The name of a driver in the cache.
    fn kept(&self, driver: &str, end: &str) -> String {
        format!("{driver}-{}{end}", self.name)
    }

    /// Returns the newest kernel stored in the cache by an earlier call; earlier versions of this
    /// crate stored no drivers.
    pub fn cached() -> Option<Self> {
        let entries = fs::read_dir(cache().ok()?).ok()?;
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let kernels = names.filter_map(|name| name.strip_prefix("vmlinuz-").map(str::to_owned));
        let newest = newest(kernels.collect())?;
        let cache = cache().ok()?;
        let kernel = Self::file(&cache.join(format!("vmlinuz-{newest}"))).ok()?;
        Some(kernel.with_drivers(&cache))
    }

    /// Downloads Debian's newest kernel of [`RELEASE`], and stores its image and its drivers in the
    /// cache.
    pub fn download() -> Result<Self, BootError> {
        let package = package()?;
        let cache = cache()?;
        fs::create_dir_all(&cache).map_err(BootError::file(&cache))?;
        // A partial download must not be mistaken for a kernel.
        let work = tempfile::Builder::new().prefix("download-").tempdir_in(&cache);
        let work = work.map_err(BootError::file(&cache))?;
        apt(Command::new("apt-get").args(["download", "-qq", &package]).current_dir(work.path()))?;
        let mut found = fs::read_dir(work.path()).map_err(BootError::file(work.path()))?.flatten();
        let Some(file) = found.find(|entry| entry.path().extension().is_some_and(|e| e == "deb"))
        else {
            return Err(BootError::Linux(format!(
                "apt-get download {package} produced no package"
            )));
        };
        let Unpacked { image, drivers } = unpack(&file.path(), work.path())?;
        let kernel = Self::file(&image)?;
        let keep = |from: &Path, name: String| {
            let kept = cache.join(name);
            fs::rename(from, &kept).map_err(BootError::file(&kept))
        };
        for (driver, end, file) in drivers {
            keep(&file, kernel.kept(driver, end))?;
        }
        let name = format!("vmlinuz-{}", kernel.name);
        keep(&image, name.clone())?;
        Ok(Self::file(&cache.join(name))?.with_drivers(&cache))
    }
}

/// `$XDG_CACHE_HOME/faultless`.
fn cache() -> Result<PathBuf, BootError> {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
    let base = base.ok_or_else(|| {
        BootError::Linux(
            "neither XDG_CACHE_HOME nor HOME is set, so the kernel has no cache directory".into(),
        )
    })?;
    Ok(base.join("faultless"))
}

/// Runs one of Debian's tools; returns its output.
fn apt(command: &mut Command) -> Result<String, BootError> {
    const HELP: &str =
        "the Linux kernel is taken from a Debian package; on other systems use --kernel FILE";
    let tool = command.get_program().to_string_lossy().into_owned();
    let ran = command.env("LC_ALL", "C").stdin(Stdio::null()).output();
    let output = ran.map_err(|error| BootError::Linux(format!("{tool}: {error}; {HELP}")))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let messages = String::from_utf8_lossy(&output.stderr);
    let error = messages.lines().rfind(|line| line.starts_with('E')).unwrap_or(messages.trim());
    let args: Vec<_> = command.get_args().map(|arg| arg.to_string_lossy()).collect();
    Err(BootError::Linux(format!("{tool} {}: {error}; {HELP}", args.join(" "))))
}

/// The package with Debian's newest kernel of the release.
fn package() -> Result<String, BootError> {
    const START: &str = "linux-image-";
    let pattern = format!("^{START}{}[.]", RELEASE.replace('.', "[.]"));
    let known = apt(Command::new("apt-cache").args(["search", "--names-only", &pattern]))?;
    let names =
        known.lines().filter_map(|line| line.split_whitespace().next()?.strip_prefix(START));
    let newest = newest(names.map(str::to_owned).collect()).ok_or_else(|| {
        BootError::Linux(format!(
            "apt finds no Linux {RELEASE}: run apt-get update, or use --kernel FILE"
        ))
    })?;
    Ok(format!("{START}{newest}"))
}

/// Returns the newest plain kernel of the release: no cloud or real-time kernel, and no debug
/// package. A signed kernel is preferred to its unsigned twin.
fn newest(names: Vec<String>) -> Option<String> {
    let patch = |name: &str| {
        let rest = name.strip_suffix("-unsigned").unwrap_or(name);
        let version = rest.strip_suffix(FLAVOUR)?.strip_prefix(RELEASE)?.strip_prefix('.')?;
        let digits = version.find(|c: char| !c.is_ascii_digit()).unwrap_or(version.len());
        let (patch, distribution) = version.split_at(digits);
        // `-cloud` and `-rt` would appear here.
        let plain = !distribution.contains('-');
        Some((patch.parse::<u32>().ok().filter(|_| plain)?, rest == name))
    };
    let of = |name: String| Some((patch(&name)?, name));
    names.into_iter().filter_map(of).max().map(|(_, name)| name)
}

/// The parts of a kernel in a package.
struct Unpacked {
    image: PathBuf,
    drivers: Drivers,
}

/// Extracts a kernel's image and drivers from a package into files in `into`.
fn unpack(package: &Path, into: &Path) -> Result<Unpacked, BootError> {
    let mut child = Command::new("dpkg-deb")
        .arg("--fsys-tarfile")
        .arg(package)
        .stdout(Stdio::piped())
        .spawn()
        .map_err(BootError::file("dpkg-deb"))?;
    let stream =
        child.stdout.take().ok_or_else(|| BootError::Linux("no output of dpkg-deb".into()))?;
    let found = files_of(stream, into).map_err(BootError::file(package));
    // After an error, the child may still be running.
    let _ = child.kill();
    let _ = child.wait();
    let (image, drivers) = found?;
    let image = image
        .ok_or_else(|| BootError::Unfit { path: package.into(), why: "no boot/vmlinuz-* in it" })?;
    Ok(Unpacked { image, drivers })
}

/// Name, end of the file's name, and file of each of [`DRIVERS`] that is a module.
type Drivers = Vec<(&'static str, &'static str, PathBuf)>;

fn files_of(stream: impl io::Read, into: &Path) -> io::Result<(Option<PathBuf>, Drivers)> {
    let (mut image, mut drivers) = (None, Drivers::new());
    for entry in tar::Archive::new(stream).entries()? {
        let mut entry = entry?;
        let path = entry.path()?.into_owned();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let driver = DRIVERS.into_iter().find_map(|driver| {
            let end = name.strip_prefix(driver)?;
            Some((driver, MODULE.into_iter().find(|known| *known == end)?))
        });
        if !entry.header().entry_type().is_file()
            || driver.is_none() && !name.starts_with("vmlinuz-")
        {
            continue;
        }
        let file = into.join(&name);
        io::copy(&mut entry, &mut File::create(&file)?)?;
        match driver {
            Some((driver, end)) => drivers.push((driver, end, file)),
            None => image = Some(file),
        }
    }
    Ok((image, drivers))
}

/// A machine of a stock kernel: QEMU's plain PC.
#[derive(Clone, Debug)]
pub struct LinuxMachine {
    /// CPUs.
    pub cpus: u16,
    /// Memory in bytes, in whole MiB.
    pub memory: u64,
    /// The nodes of memory.
    pub nodes: Nodes,
    /// The clock.
    pub clock: Clock,
    /// QEMU's name for the CPU and its features.
    pub cpu: String,
    /// The kernel.
    pub kernel: Stock,
    /// A file of the host that is the disk `/dev/vda`, for a kernel that [reads
    /// disks](Stock::reads_disks).
    pub disk: Option<PathBuf>,
    /// The size in bytes of a writable disk (`/dev/vda` if there is no other disk), for such a
    /// kernel.
    pub swap: Option<u64>,
    /// Words of the kernel's command line, in addition to the words of every machine.
    pub words: Vec<String>,
}

/// The result of a program under Linux.
#[derive(Clone, Debug)]
pub struct LinuxRun {
    /// The whole console output: the output of the program, mixed with the kernel's messages.
    pub console: String,
    /// The reason for an early end from outside, if any.
    pub cut: Option<&'static str>,
    /// The run time of QEMU.
    pub wall: Duration,
}

impl LinuxMachine {
    /// Runs a program as the first process, without files or environment.
    pub fn run(&self, program: &Program, limits: &Limits<'_>) -> Result<LinuxRun, BootError> {
        let mut initrd = Initrd::new();
        initrd.bytes("init", 0o755, program.contents().to_vec())?;
        ["dev", "proc", "sys", "tmp"].iter().for_each(|directory| initrd.directory(directory));
        let has_disk = self.disk.is_some() || self.swap.is_some();
        let drivers = if has_disk { &self.kernel.drivers[..] } else { &[] };
        for (at, driver) in drivers.iter().enumerate() {
            // The program loads the drivers in the order of their names.
            let end = MODULE.into_iter().rfind(|end| driver.to_string_lossy().ends_with(end));
            let bytes = fs::read(driver).map_err(BootError::file(driver))?;
            initrd.bytes(&format!("modules/{at}{}", end.unwrap_or_default()), 0o444, bytes)?;
        }
        let archive = archive(&initrd)?;
        // Without randomness, results repeat. A panic of the kernel, or the end of init, also ends
        // the machine.
        let mut line = self.words.clone();
        if self.nodes.are_several() {
            // Otherwise the kernel periodically unmaps pages, to detect the node of their users.
            line.push("numa_balancing=disable".to_owned());
        }
        line.push("console=ttyS0 nokaslr norandmaps quiet panic=-1 rdinit=/init --".to_owned());
        for arg in &program.args {
            line.push(arg.to_string_lossy().into_owned());
        }
        let disk = self.disk.as_deref();
        let disk = disk.map(|image| Drive::new(DriveUse::Files, image));
        let swap = self.swap.map(temporary_of).transpose()?;
        let swap = swap.as_ref().map(|image| Drive::new(DriveUse::Swap, image.path()));
        let qemu = Qemu {
            board: "pc",
            cpu: &self.cpu,
            cpus: self.cpus,
            memory: self.memory,
            nodes: &self.nodes,
            clock: self.clock,
            accel: Accel::Tcg,
            kernel: &self.kernel.image,
            initrd: archive.path(),
            line: line.join(" "),
            debug: false,
            disks: disk.into_iter().chain(swap).collect(),
        };
        let mut console = Vec::new();
        let streams = Streams {
            input: Input::None,
            output: Box::new(&mut console),
            errors: Box::new(io::sink()),
        };
        let ended = qemu.run(streams, limits)?;
        if !ended.status.success() && ended.cut.is_none() {
            return Err(BootError::Qemu(ended.complaint));
        }
        let cut = ended.cut.map(|cut| match cut {
            Cut::Timeout => "the time limit was reached",
            Cut::Stop | Cut::Closed => "interrupted",
            Cut::Unwritten(_) => "the output cannot be written",
        });
        let console = String::from_utf8_lossy(&console).replace('\r', "");
        Ok(LinuxRun { console, cut, wall: ended.wall })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_plain_kernel_is_taken() {
        let names = [
            "6.12-amd64",
            "6.12.9+deb13-amd64",
            "6.12.107+deb12-amd64-unsigned",
            "6.12.107+deb12-amd64",
            "6.12.111+deb12-cloud-amd64",
            "6.12.111+deb12-rt-amd64",
            "6.12.117+deb12-amd64-dbg",
            "6.13.1-amd64",
            "6.120.1-amd64",
            "6.12.x-amd64",
        ];
        let newest = |names: &[&str]| super::newest(names.iter().map(|&n| n.to_owned()).collect());
        assert_eq!(newest(&names).as_deref(), Some("6.12.107+deb12-amd64"));
        assert_eq!(newest(&names[2..3]).as_deref(), Some("6.12.107+deb12-amd64-unsigned"));
        assert_eq!(newest(&names[1..2]).as_deref(), Some("6.12.9+deb13-amd64"));
        assert_eq!(newest(&names[4..]), None);
    }

    #[test]
    fn files_that_are_no_kernels_are_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("vmlinuz-6.12.1-amd64");
        let mut bytes = vec![0; 0x300];
        fs::write(&file, &bytes).expect("written");
        let error = Stock::file(&file).expect_err("a missing magic number").to_string();
        assert!(error.contains("vmlinuz-6.12.1-amd64: not a Linux kernel"), "{error}");
        bytes[0x202..0x206].copy_from_slice(b"HdrS");
        fs::write(&file, &bytes).expect("written");
        assert_eq!(Stock::file(&file).expect("a kernel").name, "6.12.1-amd64");
        let gone = dir.path().join("gone");
        assert!(
            Stock::file(&gone)
                .expect_err("a missing file")
                .to_string()
                .contains("gone: No such file")
        );
    }

    #[test]
    fn image_and_drivers_are_extracted_from_a_package() {
        let mut archive = tar::Builder::new(Vec::new());
        for (name, contents) in [
            ("./boot/config-6", "no"),
            ("./boot/vmlinuz-6", "yes"),
            ("./lib/modules/6/kernel/drivers/block/virtio_blk.ko.xz", "block"),
            ("./lib/modules/6/kernel/drivers/virtio/virtio.ko", "bus"),
            ("./lib/modules/6/kernel/drivers/virtio/virtio_mmio.ko.xz", "no"),
            ("./lib/modules/6/kernel/net/virtio.c", "no"),
        ] {
            let mut header = tar::Header::new_gnu();
            header.set_size(contents.len() as u64);
            header.set_mode(0o644);
            archive.append_data(&mut header, name, contents.as_bytes()).expect("fits");
        }
        let stream = archive.into_inner().expect("the output is memory");
        let dir = tempfile::tempdir().expect("a directory");
        let (image, drivers) = files_of(&stream[..], dir.path()).expect("reads");
        assert_eq!(image, Some(dir.path().join("vmlinuz-6")));
        let drivers: Vec<_> = drivers.iter().map(|(driver, end, _)| (*driver, *end)).collect();
        assert_eq!(drivers, [("virtio_blk", ".ko.xz"), ("virtio", ".ko")]);
        let read = |name| fs::read_to_string(dir.path().join(name)).expect("written");
        assert_eq!(
            ["vmlinuz-6", "virtio_blk.ko.xz", "virtio.ko"].map(read),
            ["yes", "block", "bus"]
        );
        // A truncated stream is an error, and not a kernel.
        assert!(files_of(&stream[..1300], dir.path()).is_err());
    }

    #[test]
    fn drivers_are_found_in_dependency_order() {
        let dir = tempfile::tempdir().expect("a directory");
        let image = dir.path().join("vmlinuz-6.12.1-amd64");
        let mut bytes = vec![0; 0x300];
        bytes[0x202..0x206].copy_from_slice(b"HdrS");
        fs::write(&image, &bytes).expect("written");
        let kernel = || Stock::file(&image).expect("a kernel").with_drivers(dir.path());
        assert!(!kernel().reads_disks(), "an earlier version kept no drivers");
        let names = ["virtio_blk-6.12.1-amd64.ko.xz", "virtio-6.12.1-amd64.ko.zst"];
        for name in [names[0], names[1], "virtio_ring-6.12.2-amd64.ko"] {
            fs::write(dir.path().join(name), "module").expect("written");
        }
        assert_eq!(kernel().drivers, [names[1], names[0]].map(|name| dir.path().join(name)));
        assert!(kernel().reads_disks());
    }
}
