//! Memory of the kernel, as a device accesses it: by physical addresses.

use alloc::alloc::{alloc_zeroed, dealloc};
use core::alloc::Layout;
use core::ptr::NonNull;
use faultless_bare::paging::{DIRECT_MAP, direct};
use virtio_drivers::{BufferDirection, Hal, PAGE_SIZE, PhysAddr};

/// The kernel's heap and the frames, all of which the direct map maps.
#[derive(Debug)]
pub(crate) struct Memory;

fn layout(pages: usize) -> Option<Layout> {
    Layout::from_size_align(pages.checked_mul(PAGE_SIZE)?, PAGE_SIZE).ok()
}

// SAFETY: the heap returns zeroed memory without another owner, with the requested alignment. The
// direct map shows physical memory in order, so a range of the map is also a range for the device.
// The processor sees a device's stores without further operations.
unsafe impl Hal for Memory {
    fn dma_alloc(pages: usize, _: BufferDirection) -> (PhysAddr, NonNull<u8>) {
        let layout = layout(pages).filter(|layout| layout.size() != 0);
        // SAFETY: the layout is not empty.
        let start = layout.and_then(|layout| NonNull::new(unsafe { alloc_zeroed(layout) }));
        // Address 0 means out of memory.
        start.map_or((0, NonNull::dangling()), |start| (physical(start), start))
    }

    unsafe fn dma_dealloc(_: PhysAddr, start: NonNull<u8>, pages: usize) -> i32 {
        if let Some(layout) = layout(pages) {
            // SAFETY: allocated with this layout, by the caller's promise.
            unsafe { dealloc(start.as_ptr(), layout) };
        }
        0
    }

    unsafe fn mmio_phys_to_virt(address: PhysAddr, _: usize) -> NonNull<u8> {
        NonNull::new(direct(address)).expect("the direct map does not start at 0")
    }

    unsafe fn share(buffer: NonNull<[u8]>, _: BufferDirection) -> PhysAddr {
        physical(buffer.cast())
    }

    unsafe fn unshare(_: PhysAddr, _: NonNull<[u8]>, _: BufferDirection) {}
}

/// The physical address of a byte in the direct map.
fn physical(at: NonNull<u8>) -> PhysAddr {
    at.as_ptr() as u64 - DIRECT_MAP
}
