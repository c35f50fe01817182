//! Frames of allocators and of functions that fill memory, which hide the place in the program that
//! needs the memory.

use faultless_trace::event::Function;

/// Functions of the C library, without their prefixes.
const EXACT: [&str; 38] = [
    "malloc",
    "calloc",
    "realloc",
    "reallocarray",
    "free",
    "cfree",
    "memalign",
    "aligned_alloc",
    "posix_memalign",
    "valloc",
    "pvalloc",
    "mmap",
    "mmap64",
    "munmap",
    "mremap",
    "madvise",
    "brk",
    "sbrk",
    "sysmalloc",
    "sysmalloc_mmap",
    "sysmalloc_mmap_fallback",
    "mremap_chunk",
    "munmap_chunk",
    "new_heap",
    "alloc_new_heap",
    "grow_heap",
    "shrink_heap",
    "heap_trim",
    "ptmalloc_init",
    "madvise_thp",
    "systrim",
    "malloc_consolidate",
    "unlink_chunk",
    "alloc_perturb",
    "checked_request2size",
    "mallocx",
    "rallocx",
    "new_arena",
];

/// The beginnings of names, without prefixes of the C library.
const STARTS: [&str; 48] = [
    // The C library, with a suffix for the processor.
    "memset",
    "memcpy",
    "memmove",
    "mempcpy",
    "bzero",
    "tcache_",
    "arena_",
    // Other allocators.
    "je_",
    "rjem_",
    "mi_",
    "tc_",
    "tcmalloc::",
    "g_malloc",
    "g_realloc",
    "g_slice_alloc",
    // C++.
    "operator new",
    "operator delete",
    "std::allocator",
    "std::__new_allocator",
    "std::_Vector_base",
    "gnu_cxx::new_allocator",
    // Rust.
    "rust_alloc",
    "rust_realloc",
    "rdl_",
    "alloc::alloc",
    "alloc::raw_vec",
    "alloc::vec",
    "alloc::boxed",
    "<alloc::",
    "<T as alloc::",
    "core::ptr",
    "core::intrinsics",
    "std::sys::alloc",
    "hashbrown::raw",
    // Python.
    "PyObject_Malloc",
    "PyObject_Realloc",
    "PyObject_Calloc",
    "PyMem_",
    "PyObject_GC_",
    "PyObject_Arena",
    "PyType_AllocNoTrack",
    "PyType_GenericAlloc",
    "pymalloc_",
    "allocate_from_new_pool",
    "gc_alloc",
    // Go.
    "runtime.m",
    "runtime.(*m",
    "runtime.grow",
];

/// The beginnings of the names of libraries that are allocators.
const LIBRARIES: [&str; 4] = ["libjemalloc", "libmimalloc", "libtcmalloc", "libtbbmalloc"];

/// The beginning of the name that Python's own frames have (`python3 -X perf`).
const PYTHON: &str = "py::";

/// Returns the name of `function` without underscores in front, and without the prefixes that the C
/// library has for a function of its interface (`__GI___mmap64`).
pub(super) fn plain_name(function: &Function) -> &str {
    let mut name = function.name.trim_start_matches('_');
    for prefix in ["GI_", "libc_", "int_"] {
        name = name.strip_prefix(prefix).unwrap_or(name).trim_start_matches('_');
    }
    name
}

/// Returns whether `function` belongs to an allocator, or fills memory for its caller.
fn allocates(function: &Function) -> bool {
    let name = plain_name(function);
    EXACT.contains(&name)
        || STARTS.iter().any(|start| name.starts_with(start))
        || name.contains("::_M_allocate")
        || name.contains("::_M_realloc")
        || LIBRARIES.iter().any(|library| function.module.starts_with(library))
}

/// Returns the index of the call site among the `frames` of a stack, the innermost first: the first
/// frame outside allocators. Functions of the Python interpreter are part of the Python function
/// that they execute, if the stack has its name. A stack of allocator frames alone has its
/// outermost named frame as the call site; `None` for an empty stack.
pub fn site(frames: &[&Function]) -> Option<usize> {
    let python = frames.iter().position(|function| function.name.starts_with(PYTHON));
    let interpreter = |function: &Function| {
        function.module.starts_with("libpython") || function.module.starts_with("python")
    };
    if let Some(python) = python
        && frames[..python].iter().all(|function| interpreter(function) || allocates(function))
    {
        return Some(python);
    }
    let known = |function: &&Function| !function.name.is_empty() && !allocates(function);
    // Code in memory without a name is a sign of a program without frame pointers.
    let outside = |function: &&Function| !allocates(function) && !function.module.starts_with('[');
    let named = |function: &&Function| !function.name.is_empty();
    let first = frames.iter().position(known).or_else(|| frames.iter().position(outside));
    first.or_else(|| frames.iter().rposition(named)).or(frames.len().checked_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(names: &[&str]) -> Option<usize> {
        let function = |name: &&str| {
            let (name, module) = name.split_once('@').unwrap_or((name, "program"));
            Function { name: name.into(), module: module.into(), file: String::new() }
        };
        let functions: Vec<_> = names.iter().map(function).collect();
        site(&functions.iter().collect::<Vec<_>>())
    }

    #[test]
    fn allocator_frames_are_folded_into_their_caller() {
        for (names, want) in [
            (&["__memset_avx2_unaligned_erms", "load", "main"][..], Some(1)),
            (&["_int_malloc", "__libc_calloc", "operator new(unsigned long)", "grow"], Some(3)),
            (&["do_anonymous@libjemalloc.so.2", "parse"], Some(1)),
            (&["<alloc::vec::Vec<T> as core::clone::Clone>::clone", "copy"], Some(1)),
            (&["std::vector<int>::_M_realloc_insert", "fill"], Some(1)),
            (&["memories_of_children", "main"], Some(0)),
            (&["sysmalloc", "malloc"], Some(1)),
            (&["__GI___mmap64", "create", "main"], Some(1)),
            (&["__GI___mremap", "mremap_chunk", "__libc_realloc", "grow"], Some(3)),
            (&["__GI___libc_malloc", "__libc_calloc", "grow"], Some(2)),
            // A frame without a name is no better than its caller.
            (&["", "main"], Some(1)),
            (&["", "malloc"], Some(0)),
            (&["malloc", "calloc", "@[memory]"], Some(1)),
            (&[], None),
        ] {
            assert_eq!(chosen(names), want, "{names:?}");
        }
    }

    #[test]
    fn interpreter_frames_are_folded_into_the_python_function() {
        let python = ["list_resize@libpython3.12.so", "py::load:/app.py@[jit]", "main"];
        assert_eq!(chosen(&python), Some(1));
        // Work of a library, called by Python.
        let library = ["blas_memory@libblas.so", "py::load:/app.py@[jit]", "main"];
        assert_eq!(chosen(&library), Some(0));
        assert_eq!(chosen(&["list_resize@libpython3.11.so", "main"]), Some(0));
    }
}
