//! Why no safe call causes undefined behaviour: the promises of a kernel, and the checks against
//! each misuse.
//!
//! # Promises of a kernel
//!
//! - [`Machine`](crate::Machine): memory used by the subsystem alone, and CPUs that drop
//!   translations on request and use a space's tables only while they run the space;
//! - [`Vm::cpu`](crate::Vm::cpu): one [`Cpu`](crate::Cpu) of each number, on this CPU, never in the
//!   middle of a call;
//! - [`Space::deactivate`](crate::Space::deactivate): the CPU has stopped using the space's tables;
//! - [`Space::mmap_device`](crate::Space::mmap_device): programs may access the frames in any way.
//!
//! A device uses [pinned](crate::Space::pin) frames only while they are pinned.
//! [`Object::read_page`](crate::Shared::read_page), [`write_page`](crate::Shared::write_page) and
//! [`overwrite_page`](crate::Shared::overwrite_page) lend a raw pointer: the kernel is responsible
//! for dereferencing the pointer only while it is lent.
//!
//! # Checks in each call
//!
//! | misuse | result |
//! |---|---|
//! | a space or an object with a CPU of another [`Vm`](crate::Vm), also if the other `Vm` was made at the same address after a drop of the first | a panic, before any access: each `Vm` has an identity |
//! | a space mapping an object of another `Vm` | the same |
//! | a CPU that runs two spaces, or one space twice, or leaves a space not run by this CPU | a panic of [`activate`](crate::Space::activate) or `deactivate` |
//! | the end of a space that a CPU runs | a panic of [`exit`](crate::Space::exit); the space's frames stay allocated |
//! | a space or an object that is dropped without being ended | a CPU ends it later ([`Cpu::end_dropped`](crate::Cpu::end_dropped)) |
//! | a space that is dropped while a CPU runs it | its frames and VMAs stay allocated, because the CPU may use its tables indefinitely |
//! | a `Vm` that is dropped before its spaces and objects | spaces and objects free only their heap memory |
//! | more than 255 calls inside each other's closures ([`each_area`](crate::Space::each_area) and its like) | a panic: the maximum number of nested grace sections |
//! | a wait for a grace period, as in [`Cpu::drain`](crate::Cpu::drain), inside such a closure | a panic; in release builds only if there is something to wait for |
//! | a closure that panics | sections close, lent pages are returned, the thread of [`for_thread`](crate::Cpu::for_thread) is forgotten. Pages for write-back or stores are dirty |
//! | a [store](crate::BackingStore) that panics | no frame is leaked, and no CPU stays in a call. Pages under write-back are dirty, and open files receive `EIO`. A program whose page is being read gets SIGBUS. If the object is ending, its pages are lost, as after an error |
//! | an address of the kernel's half, an index beyond an object's end | treated as unmapped or absent |
//! | device memory that overlaps the machine's regions | `EINVAL` |
//! | access to device memory from outside, or a pin of device memory | refused, as for a missing permission |
//! | pins that outlive mappings, or the space | the frames stay allocated until the pins are dropped |
//! | nested batches of one CPU | a panic |
//!
//! # Misuse that does not compile
//!
//! The promises above require `unsafe`:
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
//! fn retire_space<M: Machine>(space: &Space<M>, cpu: &Cpu<'_, M>) {
//!     space.deactivate(cpu);
//! }
//! ```
//!
//! ```compile_fail,E0133
//! # use faultless::{Cpu, DeviceMemory, Machine, MapFlags, Prot, Space};
//! fn map<M: Machine>(space: &Space<M>, cpu: &Cpu<'_, M>, device: DeviceMemory) {
//!     let _ = space.mmap_device(cpu, None, 4096, Prot::READ, MapFlags::SHARED, device);
//! }
//! ```
//!
//! A CPU, a thread's predictor, an open section, and the locks held by a CPU are used by one thread
//! at a time. They cannot be shared, and sections and locks do not leave their CPU:
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
//! (Sections and claims have no public name; the tests of this module assert the same for both, and
//! also that a frame with a pending flush cannot be freed.)
//!
//! Spaces, objects and subsystems are shared by all CPUs, and a CPU may be sent to another thread:
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
//! A space cannot end while borrowed, nor twice; an area is accessible only during the call of the
//! closure:
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
//! fn keep<'a, M: Machine>(space: &'a Space<M>, cpu: &Cpu<'_, M>, kept: &mut Vec<Area<'a>>) {
//!     space.each_area(cpu, VirtRange::USER, |area| {
//!         kept.push(area);
//!         true
//!     });
//! }
//! ```
//!
//! The thread passed to `for_thread` outlives the call:
//!
//! ```compile_fail,E0505
//! # use faultless::{Cpu, Machine, ThreadStreams};
//! fn call<M: Machine>(cpu: &Cpu<'_, M>, thread: ThreadStreams) {
//!     cpu.for_thread(&thread, || drop(thread));
//! }
//! ```
//!
//! The memory of a page under read is accessible only while the subsystem exists:
//!
//! ```compile_fail,E0621
//! # use faultless::{Cpu, Machine, Reading};
//! fn keep<'r, M: Machine>(reading: &'r mut Reading, cpu: &Cpu<'_, M>) -> Vec<&'r mut [u8]> {
//!     reading.memory(cpu).collect()
//! }
//! ```
//!
//! Frames have no public name at all.

#[cfg(test)]
mod tests {
    use crate::frame::{FlushPending, Flushed};
    use crate::sync::grace::Section;
    use crate::sync::percpu::Local;
    use crate::sync::range::RangeGuard;

    /// Compiles only if the type does not implement the trait: otherwise the type has two
    /// implementations of `Not`, and the call is ambiguous.
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

    /// The test passes if it compiles.
    #[test]
    fn private_types_keep_the_rules() {
        assert_not!(Section<'static>: Send);
        assert_not!(RangeGuard<'static>: Send);
        assert_not!(Local: Sync);
        // A frame which may still be in a TLB can be neither freed nor allocated again.
        assert_not!(FlushPending: Flushed);
    }
}
