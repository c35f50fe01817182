//! The place of a device, parsed from the command line.

/// The registers of a virtio device in memory, and its interrupt line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The size of the registers in bytes.
    pub size: usize,
    /// The physical address of the first register.
    pub address: u64,
    /// The interrupt line.
    pub line: u32,
}

impl Place {
    /// Parses `SIZE@ADDRESS:LINE`, as in Linux's parameter `virtio_mmio.device`: numbers in
    /// decimal, or after `0x` in hexadecimal. SIZE may end with `K`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (size, rest) = text.split_once('@')?;
        let (address, line) = rest.split_once(':')?;
        let size = match size.strip_suffix(['K', 'k']) {
            Some(kilobytes) => number(kilobytes)?.checked_mul(1024)?,
            None => number(size)?,
        };
        Some(Self {
            size: usize::try_from(size).ok()?,
            address: number(address)?,
            line: u32::try_from(number(line)?).ok()?,
        })
    }
}

fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_parsed_like_linux() {
        let place = Place { size: 512, address: 0xfeb0_0000, line: 24 };
        assert_eq!(Place::parse("512@0xfeb00000:24"), Some(place));
        assert_eq!(Place::parse("0x200@0xfeb00000:0x18"), Some(place));
        assert_eq!(Place::parse("4K@0xfeb00000:24"), Some(Place { size: 4096, ..place }));
    }

    #[test]
    fn invalid_places_are_rejected() {
        for text in ["", "512", "512@", "512@0xfeb00000", "@0xfeb00000:5", "512@0xg:5", "512@1:5:6"]
        {
            assert_eq!(Place::parse(text), None, "{text}");
        }
        assert_eq!(Place::parse("18014398509481984K@0:1"), None, "too large");
        assert_eq!(Place::parse("1@0:4294967296"), None, "no such line");
    }
}
