//! Objects
#![cfg(loom)]

#[macro_use]
mod models;

use faultless::{CpuId, Object};
use loom::thread;
use models::explore;
use models::machine::Toy;
use std::sync::Arc;

fn a_page_against_truncation() {
    explore(Some(3), || {
        let vm = Toy::vm(2, 8);
        // SAFETY: one `Cpu` of each number.
        let cpu = unsafe { vm.cpu(CpuId(0)) };
        let object = Object::try_new(&cpu, 1, 0).unwrap();
        let maker = {
            let (vm, object) = (Arc::clone(&vm), object.clone());
            thread::spawn(move || {
                // SAFETY: one `Cpu` of each number.
                let cpu = unsafe { vm.cpu(CpuId(1)) };
                object.write_page(&cpu, 0, |_| ()).is_ok();
                Object::release(object, &cpu);
                cpu.drain();
            })
        };
        object.set_pages(&cpu, 0).unwrap();
        maker.join().unwrap();
        assert_eq!(object.resident_pages(&cpu), 0, "a page is beyond the end");
        assert!(!object.has_page(&cpu, 0), "a page is beyond the end");
        Object::release(object, &cpu);
        cpu.drain();
        let census = vm.audit(&cpu).unwrap();
        assert_eq!((census.free, census.zero), (7, 1));
    });
}

#[test]
fn no_page_is_beyond_the_end() {
    a_page_against_truncation();
}

caught! {
    who_shortens_needs_its_fence:
        without TruncateFence, a_page_against_truncation(), says "a page is beyond the end";
    who_makes_a_page_looks_again:
        without ObjectLooksAgain, a_page_against_truncation(), says "a page is beyond the end";
}
