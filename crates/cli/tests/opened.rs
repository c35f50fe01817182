//! `run --apply huge-text`: libraries that a program opens by `dlopen`.

mod common;

use common::program::{Place, compilers};

/// A library with more than 4 MiB of text. Its constructor starts a thread that executes the text
/// all the time.
const LIBRARY: &str = r#"
static volatile unsigned long rounds, wrong;
#define FUNCTION(name) __attribute__((noinline)) unsigned long name(unsigned long n) { \
    unsigned long sum = 0; \
    for (unsigned long i = 0; i < n; i++) { sum += i; __asm__ volatile("" : "+r"(sum)); } \
    if (n == 7) __asm__ volatile(".fill 1400000, 1, 0x90"); \
    return sum; \
}
FUNCTION(g1) FUNCTION(g2) FUNCTION(g3) FUNCTION(g4)
static void *work(void *unused) {
    for (;; rounds++)
        if (g1(100) != 4950 || g2(100) != 4950 || g3(100) != 4950 || g4(100) != 4950) wrong++;
    return unused;
}
__attribute__((constructor)) static void start(void) {
    pthread_t thread;
    if (getenv("WORKS") && pthread_create(&thread, 0, work, 0)) exit(92);
}
unsigned long progress(void) { return wrong ? 0 : rounds; }
"#;

/// Opens a library of [`LIBRARY`] by the run path of the program.
const OPENS: &str = r#"
#include <dlfcn.h>
static unsigned long opened(void) {
    void *library = dlopen("liblarge.so", RTLD_NOW);
    if (!library) { fprintf(stderr, "%s\n", dlerror()); exit(93); }
    unsigned long (*function)(unsigned long) = dlsym(library, "g3");
    if (!function || function(7) != 21 || function(100) != 4950) exit(94);
    return huge((unsigned long)function) >= 2048;
}
"#;

/// Compiles the library and the program of `main`, and runs the program with the advice. Returns
/// the exit status and the standard error for each compiler.
fn run(advice: &str, main: &str, options: &[&str], works: bool) -> Vec<(Option<i32>, String)> {
    let options = [&["--apply", advice], options].concat();
    let place = Place::new();
    let folder = place.path("libraries");
    std::fs::create_dir(&folder).expect("a directory");
    let ran = |compiler| {
        let library = ["-O1", "-fPIC", "-shared", "-pthread"];
        let library = place.compile(compiler, "libraries/liblarge.so", LIBRARY, &library);
        for number in 0..4 {
            let copy = folder.join(format!("liblarge{number}.so"));
            std::fs::copy(&library, copy).expect("written");
        }
        let linked = ["-O1", "-pthread", "-Wl,-rpath,$ORIGIN/libraries", "-ldl"];
        let program = place.compile(compiler, compiler, &format!("{OPENS}{main}"), &linked);
        let mut run = place.command(&options, &[&program]);
        if works {
            run.env("WORKS", "1");
        }
        let ran = common::Ran::of(&mut run);
        (ran.code, ran.err)
    };
    compilers().map(ran).collect()
}

#[track_caller]
fn ends_with_five(advice: &str, main: &str, works: bool) {
    for ran in run(advice, main, &[], works) {
        assert_eq!(ran, (Some(5), String::new()));
    }
}

/// Also without the library, new kernels map a part of a new file by huge pages. So the test reads
/// the report.
#[test]
fn text_of_opened_library_moves_to_huge_pages() {
    let main = "int main(void) { return opened() ? 5 : 6; }";
    for (code, report) in run("huge-text", main, &["--report"], false) {
        assert_eq!(code, Some(5));
        let line = "    huge-text: 1 segment of these in libraries opened by the program\n";
        assert!(report.contains(line), "{report}");
    }
}

/// musl never closes a library.
#[test]
fn library_that_is_opened_again_moves_again() {
    let main = r#"int main(void) {
        for (int i = 0; i < 20; i++) {
            if (!opened()) return 6;
            void *library = dlopen("liblarge.so", RTLD_NOW | RTLD_NOLOAD);
            dlclose(library);
            dlclose(library);
        }
        return 5;
    }"#;
    let expected = [
        "    huge-text: 20 segments of these in libraries opened by the program\n",
        "    huge-text: 1 segment of these in libraries opened by the program\n",
    ];
    for ((code, report), line) in run("huge-text", main, &["--report"], false).iter().zip(expected)
    {
        assert_eq!(*code, Some(5));
        assert!(report.contains(line), "{report}");
    }
}

/// A thread of the library's constructor executes the text before and after the move.
#[test]
fn threads_execute_text_while_it_moves() {
    let main = r#"int main(void) {
        if (!opened()) return 6;
        unsigned long (*progress)(void) = dlsym(RTLD_DEFAULT, "g1");
        if (progress) return 7;
        progress = dlsym(dlopen("liblarge.so", RTLD_NOW), "progress");
        unsigned long before = progress();
        for (int i = 0; i < 5000 && progress() < before + 10; i++) usleep(1000);
        return progress() >= before + 10 ? 5 : 8;
    }"#;
    ends_with_five("huge-text", main, true);
}

/// Each thread opens, uses and closes its own library. So a thread finds the new library of another
/// thread, and copies its text while the other thread closes the library.
#[test]
fn threads_open_and_close_libraries_at_the_same_time() {
    let main = r#"
    static void *work(void *number) {
        char name[32];
        snprintf(name, sizeof name, "liblarge%ld.so", (long)number);
        for (int i = 0; i < 600; i++) {
            void *library = dlopen(name, RTLD_NOW);
            unsigned long (*function)(unsigned long) = dlsym(library, i % 2 ? "g1" : "g3");
            if (!function || function(7) != 21) exit(95);
            dlclose(library);
        }
        return number;
    }
    int main(void) {
        pthread_t threads[4];
        for (long i = 0; i < 4; i++) if (pthread_create(&threads[i], 0, work, (void *)i)) return 3;
        for (int i = 0; i < 4; i++) pthread_join(threads[i], 0);
        return 5;
    }"#;
    ends_with_five("huge-text,populate,prefault-ahead", main, false);
}

/// A signal handler can interrupt the library, and call `dlsym`. The library calls this
/// `dl_iterate_phdr`. `dlvsym` has no hook.
#[test]
fn dlsym_within_a_move_begins_no_second_move() {
    let main = r#"
    #include <link.h>
    typedef int visitor(struct dl_phdr_info *, size_t, void *);
    static int opens, within, visits, nested;
    int dl_iterate_phdr(visitor visit, void *state) {
        int (*next)(visitor, void *) = dlvsym(RTLD_NEXT, "dl_iterate_phdr", VERSION);
        visits += opens;
        nested += within;
        if (opens && !within) {
            within = 1;
            dlsym(RTLD_DEFAULT, "stdin");
            within = 0;
        }
        return next(visit, state);
    }
    int main(void) {
        opens = 1;
        if (!opened() || !visits) return 6;
        return nested ? 7 : 5;
    }"#;
    let place = Place::new();
    let folder = place.path("libraries");
    std::fs::create_dir(&folder).expect("a directory");
    let library = ["-O1", "-fPIC", "-shared", "-pthread"];
    place.compile("gcc", "libraries/liblarge.so", LIBRARY, &library);
    let version = if cfg!(target_arch = "x86_64") { "2.2.5" } else { "2.17" };
    let version = format!("-DVERSION=\"GLIBC_{version}\"");
    let linked = ["-O1", "-rdynamic", "-Wl,-rpath,$ORIGIN/libraries", "-ldl", &version];
    let program = place.compile("gcc", "program", &format!("{OPENS}{main}"), &linked);
    let ran = place.run("huge-text", &[&program]);
    assert_eq!((ran.code, &*ran.err), (Some(5), ""));
}

/// The C library finds the caller of `dlsym` by the return address. With this library as the
/// caller, the next `puts` would be the function of the linked library.
#[test]
fn dlsym_finds_the_next_symbol_of_its_caller() {
    let library = r#"
    #include <dlfcn.h>
    int puts(const char *text) { return text != 0; }
    int is_next_of_libc(void) {
        void *next = dlsym(RTLD_NEXT, "puts");
        return next && next != (void *)puts && dlsym(RTLD_DEFAULT, "puts") == (void *)puts;
    }"#;
    let main = r#"
    #include <dlfcn.h>
    int is_next_of_libc(void);
    int main(void) {
        if (!is_next_of_libc()) return 6;
        if (dlsym(RTLD_DEFAULT, "no_such_symbol") || !dlerror() || dlerror()) return 7;
        void *(*allocate)(size_t) = dlsym(RTLD_NEXT, "malloc");
        return allocate && allocate(100) ? 5 : 8;
    }"#;
    let place = Place::new();
    for compiler in compilers() {
        let shared = ["-O1", "-fPIC", "-fno-builtin", "-shared"];
        let library = place.compile(compiler, "libown.so", library, &shared);
        let linked = ["-O1", &library, "-ldl"];
        let program = place.compile(compiler, compiler, main, &linked);
        for advice in ["huge-text", "populate"] {
            let ran = place.run(advice, &[&program]);
            assert_eq!((ran.code, &*ran.err), (Some(5), ""), "{compiler}");
        }
    }
}
