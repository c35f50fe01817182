//! Conversions between the types of the two copies of the subsystem. Programs and the TLBs use the
//! plain copy.

use faultless_observed as observed;

pub(crate) fn prot(prot: faultless::Prot) -> observed::Prot {
    observed::Prot::from_bits_truncate(prot.bits())
}

pub(crate) fn map_flags(flags: faultless::MapFlags) -> observed::MapFlags {
    observed::MapFlags::from_bits_truncate(flags.bits())
}

pub(crate) fn remap_flags(flags: faultless::RemapFlags) -> observed::RemapFlags {
    observed::RemapFlags::from_bits_truncate(flags.bits())
}

pub(crate) fn advice(advice: faultless::Advice) -> Option<observed::Advice> {
    observed::Advice::from_number(advice as u32)
}

pub(crate) fn access(access: faultless::Access) -> observed::Access {
    match access {
        faultless::Access::Read => observed::Access::Read,
        faultless::Access::Write => observed::Access::Write,
        faultless::Access::Execute => observed::Access::Execute,
    }
}
