//! No safe call causes undefined behaviour: who promises what, and what closes each way around it.
//!
//! # What a kernel promises
//!
//! - [`Machine`](crate::Machine): memory that is the subsystem's alone, CPUs that drop translations when they are told,
//!   and use a space's tables only while they run it;
//! - [`Vm::cpu`](crate::Vm::cpu): one [`Cpu`](crate::Cpu) of a number, on that CPU, never in the middle of a call;
//! - [`Space::deactivate`](crate::Space::deactivate): the CPU uses the space's tables no more;
//! - [`Space::mmap_device`](crate::Space::mmap_device): programs may do what they like with the frames.
//!
//! A device that uses [pinned](crate::Space::pin) frames does so while they are pinned. What [`Object::read_page`](crate::Shared::read_page) and [`write_page`](crate::Shared::write_page) lend, and
//! [`overwrite_page`](crate::Shared::overwrite_page), is a raw pointer: to follow it is the kernel's business too, while it is lent.
//!
//! # What is looked at in each call
//!
//! | misuse | result |
//! |---|---|
//! | a space or an object with a CPU of another [`Vm`](crate::Vm), also if that one was made at the same address after the first was dropped | a panic, before anything was touched: each `Vm` has an identity |
//! | a space mapping an object of another `Vm` | the same |
//! | a CPU that runs two spaces, or one twice, or leaves one that it does not run | a panic of [`activate`](crate::Space::activate) or `deactivate` |
//! | the end of a space that a CPU runs | a panic of [`exit`](crate::Space::exit); the space's frames stay allocated |
//! | a space or an object that is dropped, not ended | a CPU ends it later ([`Cpu::end_dropped`](crate::Cpu::end_dropped)) |
//! | a space that is dropped while a CPU runs it | its frames and VMAs stay allocated: the CPU may use its tables for ever |
//! | a `Vm` that is dropped before its spaces and objects | these free their memory on the heap |
//! | more than 255 calls inside each other's closures ([`each_area`](crate::Space::each_area) and its like) | a panic: as many grace sections are counted |
//! | a wait for a grace period, as in [`Cpu::drain`](crate::Cpu::drain), inside such a closure | a panic |
//! | a closure that panics | sections close, lent pages go back, the thread of [`for_thread`](crate::Cpu::for_thread) is forgotten. Pages that were to be written back, or stored to, are dirty |
//! | a [store](crate::BackingStore) that panics | no frame is lost, and no CPU stays in a call. Pages that it was writing are dirty, and open files receive `EIO`. A program whose page is being read gets SIGBUS. If the object is ending, its pages are lost, as after an error |
//! | an address of the kernel's half, an index beyond an object's end | as if nothing were there |
//! | device memory that overlaps the machine's regions | `EINVAL` |
//! | device memory that is reached from outside, or pinned | refused, as if the protection forbade it |
//! | pins that outlive mappings, or the space | the frames stay allocated until they are dropped |
//! | two batches of one CPU inside each other | a panic |
//!
//! # What does not compile
//!
//! The rights above are asked for by `unsafe`:
//!
//! ```compile_fail,E0133
//! # use faultless::{Cpu, CpuId, Machine, Vm};
//! fn cpu<M: Machine>(vm: &Vm<M>) -> Cpu<'_, M> {
//!     vm.cpu(CpuId(0))
//! }
//! ```
//!
//! ```compile_fail,E0133
//! # use faultless::{Cpu, Machine, Space};
//! fn leave<M: Machine>(space: &Space<M>, cpu: &Cpu<'_, M>) {
//!     space.deactivate(cpu);
//! }
//! ```
//!
//! ```compile_fail,E0133
//! # use faultless::{Cpu, DeviceMemory, Machine, MapFlags, Prot, Space};
//! fn map<M: Machine>(space: &Space<M>, cpu: &Cpu<'_, M>, device: DeviceMemory) {
//!     let _ = space.mmap_device(cpu, 0, 4096, Prot::READ, MapFlags::SHARED, device);
//! }
//! ```
//!
//! A CPU is used by one thread at a time, and so are what a thread's faults let expect, an open section, and what
//! a CPU holds; none of these is shared, and the last two do not leave their CPU:
//!
//! ```compile_fail,E0277
//! # use faultless::{Cpu, Machine};
//! fn shared<T: Sync>() {}
//! fn cpu<M: Machine>() {
//!     shared::<Cpu<'static, M>>();
//! }
//! ```
//!
//! ```compile_fail,E0277
//! fn shared<T: Sync>() {}
//! shared::<faultless::ThreadStreams>();
//! ```
//!
//! ```compile_fail,E0277
//! fn sent<T: Send>() {}
//! sent::<faultless::locks::SpinGuard<'static, u32>>();
//! ```
//!
//! (Sections and claims have no name outside; the tests of this module assert the same of them, and that a frame which
//! owes a flush is not one that may be freed.)
//!
//! Spaces, objects and subsystems are shared by all CPUs, and a CPU may be handed to another thread:
//!
//! ```
//! # use faultless::{Cpu, Machine, Object, Shared, Space, ThreadStreams, Vm};
//! fn shared<T: Send + Sync>() {}
//! fn sent<T: Send>() {}
//! fn all<M: Machine>() {
//!     shared::<Vm<M>>();
//!     shared::<Space<M>>();
//!     shared::<Shared<Object>>();
//!     sent::<Cpu<'static, M>>();
//!     sent::<ThreadStreams>();
//! }
//! ```
//!
//! A space does not end while it is borrowed, nor twice; an area is seen only in the call of the closure:
//!
//! ```compile_fail,E0505
//! # use faultless::{Cpu, Machine, Space, VirtRange};
//! fn end<M: Machine>(space: Space<M>, cpu: &Cpu<'_, M>) {
//!     space.each_area(cpu, VirtRange::USER, |_| {
//!         space.exit(cpu);
//!         true
//!     });
//! }
//! ```
//!
//! ```compile_fail,E0382
//! # use faultless::{Cpu, Machine, Space};
//! fn end<M: Machine>(space: Space<M>, cpu: &Cpu<'_, M>) {
//!     space.exit(cpu);
//!     space.exit(cpu);
//! }
//! ```
//!
//! ```compile_fail,E0521
//! # use faultless::{Area, Cpu, Machine, Space, VirtRange};
//! fn keep<'a, M: Machine>(space: &'a Space<M>, cpu: &Cpu<'_, M>, kept: &mut Vec<&'a Area>) {
//!     space.each_area(cpu, VirtRange::USER, |area| {
//!         kept.push(area);
//!         true
//!     });
//! }
//! ```
//!
//! A thread that a call is made for outlives the call:
//!
//! ```compile_fail,E0505
//! # use faultless::{Cpu, Machine, ThreadStreams};
//! fn call<M: Machine>(cpu: &Cpu<'_, M>, thread: ThreadStreams) {
//!     cpu.for_thread(&thread, || drop(thread));
//! }
//! ```
//!
//! The memory of a page that is being read is reached only while the subsystem is there:
//!
//! ```compile_fail,E0621
//! # use faultless::{Cpu, Machine, Reading};
//! fn keep<'r, M: Machine>(reading: &'r mut Reading, cpu: &Cpu<'_, M>) -> Vec<&'r mut [u8]> {
//!     reading.memory(cpu).collect()
//! }
//! ```
//!
//! Frames have no name outside at all.

#[cfg(test)]
mod tests {
    use crate::frame::{Owed, Settled};
    use crate::sync::grace::Section;
    use crate::sync::percpu::Local;
    use crate::sync::range::RangeGuard;

    /// Compiles where the type does not implement the trait: one that does has two `Not`s, and the compiler cannot
    /// tell which is meant.
    macro_rules! assert_not {
        ($type:ty: $trait:path) => {{
            trait Not<Which> {
                fn holds() {}
            }
            struct Other;
            impl<T: ?Sized> Not<()> for T {}
            impl<T: ?Sized + $trait> Not<Other> for T {}
            <$type as Not<_>>::holds();
        }};
    }

    /// That it compiles is the test.
    #[test]
    fn what_has_no_name_outside_keeps_the_rules() {
        assert_not!(Section<'static>: Send);
        assert_not!(RangeGuard<'static>: Send);
        assert_not!(Local: Sync);
        // A frame that may still be in a TLB can be neither freed nor given out anew.
        assert_not!(Owed: Settled);
    }
}
