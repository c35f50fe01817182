//! Frames that hide the place in the program that needs memory: allocators, functions that fill
//! memory, the C library and the dynamic linker.

use faultless_trace::event::Function;

/// Functions of the C library, without their prefixes.
const EXACT: [&str; 43] = [
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
    "morecore",
    "glibc_morecore",
    "default_morecore",
    "mid_memalign",
    "malloc_hook_ini",
];

/// The suffixes of functions that GCC has specialized or divided.
const SUFFIXES: [&str; 4] = [".part.", ".isra.", ".constprop.", ".cold"];

/// The beginnings of the file names of C libraries: glibc, before version 2.34 with threads in a
/// library of their own, and musl.
const C_LIBRARIES: [&str; 5] = ["libc.", "libc-", "libpthread.", "libpthread-", "ld-musl"];

/// The beginnings of the file names of glibc's dynamic linker.
const LINKERS: [&str; 4] = ["ld-linux", "ld-2.", "ld.so", "ld64.so"];

/// The functions that call `main` and the functions of threads, which static programs contain.
const STARTING: [&str; 5] =
    ["_start", "__libc_start_main", "__libc_start_main_impl", "__libc_start_call_main", "__clone3"];

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

/// Returns the name of `function` without underscores in front, without the prefixes that the C
/// library has for a function of its interface (`__GI___mmap64`), and without suffixes of GCC.
pub(super) fn plain_name(function: &Function) -> &str {
    let mut name = function.name.trim_start_matches('_');
    for suffix in SUFFIXES {
        name = name.split_once(suffix).map_or(name, |(name, _)| name);
    }
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

/// Returns whether the name of `module` begins with an entry of `starts`.
fn begins(module: &str, starts: &[&str]) -> bool {
    starts.iter().any(|start| module.starts_with(start))
}

/// Returns whether `module` is the C library.
pub(super) fn is_c_library(module: &str) -> bool {
    begins(module, &C_LIBRARIES)
}

/// Returns whether `function` is no place in the program: a part of an allocator, of the C library
/// or of the dynamic linker.
fn hides(function: &Function) -> bool {
    allocates(function)
        || is_c_library(&function.module)
        || begins(&function.module, &LINKERS)
        || STARTING.contains(&&*function.name)
}

/// Returns whether `function` is a useful name of a caller: the start of each program, and code in
/// memory without a name, are not.
pub(super) fn is_caller(function: &Function) -> bool {
    let unknown = function.name.is_empty()
        && (function.module.is_empty() || function.module.starts_with('['));
    !unknown && !STARTING.contains(&&*function.name)
}

/// The place in the program to which a call stack belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// The frame with this index, from the innermost frame on.
    Frame(usize),
    /// The dynamic linker, without a caller in the program.
    Linker,
    /// No frame is outside the C library and allocators.
    Unknown,
}

/// Returns the place among the `frames` of a stack, the innermost first: the first frame outside
/// allocators, the C library and the dynamic linker. Functions of the Python interpreter are part
/// of the Python function that they execute, if the stack has its name. `None` for an empty stack.
pub(super) fn place(frames: &[&Function]) -> Option<Found> {
    let python = frames.iter().position(|function| function.name.starts_with(PYTHON));
    let interpreter = |function: &Function| {
        function.module.starts_with("libpython") || function.module.starts_with("python")
    };
    if let Some(python) = python
        && frames[..python].iter().all(|function| interpreter(function) || hides(function))
    {
        return Some(Found::Frame(python));
    }
    let named = |function: &&Function| !function.name.is_empty() && !hides(function);
    // Code in memory without a name is a sign of a program without frame pointers.
    let in_file = |function: &&Function| {
        !hides(function) && !function.module.is_empty() && !function.module.starts_with('[')
    };
    let first = frames.iter().position(named).or_else(|| frames.iter().position(in_file));
    if let Some(first) = first {
        return Some(Found::Frame(first));
    }
    let linker = frames.iter().any(|function| begins(&function.module, &LINKERS));
    (!frames.is_empty()).then_some(if linker { Found::Linker } else { Found::Unknown })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(names: &[&str]) -> Option<Found> {
        let function = |name: &&str| {
            let (name, module) = name.split_once('@').unwrap_or((name, "program"));
            Function { name: name.into(), module: module.into(), file: String::new() }
        };
        let functions: Vec<_> = names.iter().map(function).collect();
        place(&functions.iter().collect::<Vec<_>>())
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
            (&["__GI___mmap64", "create", "main"], Some(1)),
            (&["__GI___mremap", "mremap_chunk", "__libc_realloc", "grow"], Some(3)),
            (&["__GI___libc_malloc", "__libc_calloc", "grow"], Some(2)),
            (&["__glibc_morecore", "sysmalloc", "_int_malloc", "malloc", "grow"], Some(4)),
            (&["__brk", "__sbrk", "__morecore", "sysmalloc.part.0", "malloc", "grow"], Some(5)),
            (&["unlink_chunk.constprop.0", "free", "drop"], Some(2)),
            // A frame without a name is no better than its caller.
            (&["", "main"], Some(1)),
            (&["", "malloc"], Some(0)),
        ] {
            assert_eq!(chosen(names), want.map(Found::Frame), "{names:?}");
        }
        assert_eq!(chosen(&[]), None);
    }

    #[test]
    fn functions_of_the_c_library_belong_to_their_caller() {
        let open = ["mmap64@libc.so.6", "fopen_internal@libc.so.6", "fopen@libc.so.6", "load"];
        let plugin = ["_dl_map_segments@ld-linux-x86-64.so.2", "dlopen@libc.so.6", "plug"];
        for (names, want) in [
            (&open[..], Found::Frame(3)),
            (&plugin, Found::Frame(2)),
            (&["mmap@ld-musl-x86_64.so.1", "main"], Found::Frame(1)),
            // The program has this function.
            (&["qsort@program", "main"], Found::Frame(0)),
            (&["ld.bfd@ld.bfd"], Found::Frame(0)),
            (&open[..3], Found::Unknown),
            (&["mmap@ld-musl-x86_64.so.1"], Found::Unknown),
            (&["malloc", "calloc", "@[memory]"], Found::Unknown),
            (&["malloc@libc.so.6", "@"], Found::Unknown),
            (&["fgets@libc.so.6", "__libc_start_call_main@libc.so.6", "_start"], Found::Unknown),
            (&plugin[..2], Found::Linker),
            (&["dl_main@ld-linux-x86-64.so.2", "_dl_start@ld-linux-x86-64.so.2"], Found::Linker),
        ] {
            assert_eq!(chosen(names), Some(want), "{names:?}");
        }
    }

    #[test]
    fn start_of_a_program_and_unknown_memory_are_no_callers() {
        let of = |(name, module): (&str, &str)| {
            is_caller(&Function { name: name.into(), module: module.into(), file: String::new() })
        };
        let callers = [("main", "app"), ("", "app"), ("qsort", "libc.so.6"), ("grow", "[jit]")];
        assert_eq!(callers.map(of), [true; 4]);
        let others = [("", ""), ("", "[memory]"), ("__libc_start_call_main", "libc.so.6")];
        assert_eq!(others.map(of), [false; 3]);
    }

    #[test]
    fn interpreter_frames_are_folded_into_the_python_function() {
        let python = ["list_resize@libpython3.12.so", "py::load:/app.py@[jit]", "main"];
        assert_eq!(chosen(&python), Some(Found::Frame(1)));
        // Work of a library, called by Python.
        let library = ["blas_memory@libblas.so", "py::load:/app.py@[jit]", "main"];
        assert_eq!(chosen(&library), Some(Found::Frame(0)));
        let alone = chosen(&["list_resize@libpython3.11.so", "main"]);
        assert_eq!(alone, Some(Found::Frame(0)));
    }
}
