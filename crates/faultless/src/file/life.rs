//! How an object begins and ends.

use super::object::Object;
use crate::addr::FrameNumber;
use crate::error::Errno;
use crate::frame::Use;
use crate::heap::Shared;
use crate::machine::Machine;
use crate::sync::atomic::AtomicU64;
use crate::table::node::ROOT;
use crate::vm::Cpu;

impl Object {
    /// An object of `pages` pages of zeros. What `tag` means is up to the kernel, which finds it in
    /// listings ([`AreaInfo::tag`](crate::AreaInfo::tag)); 0 is nameless memory.
    ///
    /// # Errors
    /// `EFBIG`: more than [`MAX_PAGES`](Self::MAX_PAGES). `ENOMEM`.
    pub fn try_new<M: Machine>(
        cpu: &Cpu<'_, M>,
        pages: u64,
        tag: u64,
    ) -> Result<Shared<Self>, Errno> {
        if pages > Self::MAX_PAGES {
            return Err(Errno::EFBIG);
        }
        cpu.end_dropped();
        let place = cpu.vm().ended.place()?;
        let frame = cpu.alloc_or_wait()?.zero(cpu.vm().machine());
        let root = cpu.vm().frames.publish(frame, Use::Table, 0, u64::from(ROOT));
        let identity = cpu.identity();
        let object = Self { root, pages: AtomicU64::new(pages), tag, identity, place };
        Ok(Shared::try_new(object).inspect_err(|_| {
            // It was dropped.
            cpu.end_dropped();
        })?)
    }

    /// Gives up a share. With the last one the object ends; pages of it from which another CPU is copying
    /// end a moment later.
    pub fn release<M: Machine>(object: Shared<Self>, cpu: &Cpu<'_, M>) {
        object.check_vm(cpu);
        if let Some(last) = object.into_last() {
            last.destroy(cpu);
        }
    }

    /// Makes sure that `cpu` is of the subsystem that made this object. Every operation that is not of this crate
    /// alone does so first.
    ///
    /// # Panics
    /// Where it is not.
    #[inline]
    pub(crate) fn check_vm<M: Machine>(&self, cpu: &Cpu<'_, M>) {
        self.identity.check(cpu.identity());
    }

    /// Frees all its pages and tables.
    fn destroy<M: Machine>(mut self, cpu: &Cpu<'_, M>) {
        self.place.vacate();
        // SAFETY: the last share of the object is gone, so its tables are ours alone.
        unsafe { Self::end(cpu, self.root, self.pages()) };
    }

    /// Frees the pages and tables of an object whose root table is `root`.
    ///
    /// # Safety
    /// The tables are the caller's alone.
    pub(crate) unsafe fn end<M: Machine>(cpu: &Cpu<'_, M>, root: FrameNumber, pages: u64) {
        // SAFETY: the caller's promise.
        unsafe {
            Self::free_below(cpu, root, 0..pages);
            cpu.free_tables(root, ROOT);
        }
    }
}
