//! `run --apply prefault-ahead`: blocks are populated ahead of their use, and programs with
//! threads, fork, exec and signals work as without the library.

mod common;

use common::program::{Place, compilers};

/// The start of each program. `touch` stores to the pages of a range in order, slowly enough for
/// the helper on a loaded host.
const TOUCH: &str = r"
#define MIB (1 << 20)
static void pause_ms(int ms) { struct timespec t = { 0, ms * 1000000L }; nanosleep(&t, 0); }
static void touch(char *block, long from, long to) {
    for (long at = from; at < to; at += 4096) {
        block[at] = 1;
        if (at % (64 << 10) == 0) pause_ms(1);
    }
}
/* Waits until the resident memory has reached a limit in MiB, for at most five seconds. */
static double reaches(double before, double limit) {
    for (int i = 0; i < 500 && resident() - before < limit; i++) pause_ms(10);
    return resident() - before;
}
";

/// Runs the program of `main` with each C library. The program ends with 5.
#[track_caller]
fn ends_with_five(advice: &str, main: &str) {
    let place = Place::new();
    for compiler in compilers() {
        let source = format!("#include <time.h>\n{TOUCH}{main}");
        let program = place.compile(compiler, compiler, &source, &["-O1", "-pthread"]);
        let ran = place.run(advice, &[&program]);
        assert_eq!((ran.code, &*ran.err), (Some(5), ""), "{compiler}: {}", ran.out);
    }
}

#[test]
fn pages_in_order_are_populated_ahead_by_a_bounded_distance() {
    for make in ["malloc(64 * MIB)", "calloc(64, MIB)", "MAP(64 * MIB)", "realloc(0, 64 * MIB)"] {
        let main = format!(
            r#"int main(void) {{
                char *block = {make};
                double before = resident();
                touch(block, 0, 16 * MIB);
                double grown = reaches(before, 18);
                pause_ms(50);
                grown = resident() - before;
                printf("%.1f MiB are resident\n", grown);
                return grown >= 18 && grown <= 16 + 6 + 1 ? 5 : 1;
            }}"#
        );
        ends_with_five("prefault-ahead=4M", &main);
    }
}

/// The program reports pages of another size to the library, by its own `getauxval`.
const PAGE_SIZE: &str = r#"
#include <fcntl.h>
#include <sys/resource.h>
unsigned long getauxval(unsigned long type) {
    unsigned long pair[2], found = 0;
    int file = open("/proc/self/auxv", O_RDONLY);
    while (read(file, pair, sizeof pair) == sizeof pair && pair[0])
        if (pair[0] == type) found = pair[1];
    close(file);
    return type == 6 ? PAGE : found;
}
static long faults(void) {
    struct rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_minflt;
}
/* On a busy host the helper can be late. */
int main(void) {
    for (int i = 0; i < 3; i++) {
        char *block = MAP(64 * MIB);
        double before = resident();
        long first = faults();
        touch(block, 0, 16 * MIB);
        long faulted = faults() - first;
        pause_ms(50);
        double grown = resident() - before;
        printf("%ld of 4096 pages by faults, %.1f MiB are resident\n", faulted, grown);
        if (grown > 16 + 1.5 + 2) return 1;
        if (faulted < 2867) return 5;
        munmap(block, 64 * MIB);
    }
    return 2;
}
"#;

/// At least 30 % of the pages are populated, also if a page has 64 KiB, and a distance of 1 MiB 16
/// pages.
#[test]
fn small_distance_works_with_each_size_of_a_page() {
    let place = Place::new();
    for compiler in compilers() {
        for page in [4096, 16384, 65536] {
            let source = format!("#include <time.h>\n#define PAGE {page}\n{TOUCH}{PAGE_SIZE}");
            let options = ["-O1", "-pthread", "-rdynamic"];
            let program = place.compile(compiler, &format!("{compiler}-{page}"), &source, &options);
            let ran = place.run("prefault-ahead=1M,no-thp", &[&program]);
            assert_eq!((ran.code, &*ran.err), (Some(5), ""), "{compiler}, {page}: {}", ran.out);
        }
    }
}

#[test]
fn pages_at_random_places_are_not_populated_ahead() {
    let main = r#"int main(void) {
        char *block = malloc(64 * MIB);
        double before = resident();
        unsigned place = 1;
        for (int i = 0; i < 1638; i++) {
            place = place * 1664525 + 1013904223;
            block[(place >> 8) % (64 * 256) * 4096L] = 1;
            if (i % 16 == 0) pause_ms(1);
        }
        pause_ms(100);
        double grown = resident() - before;
        printf("%.1f MiB are resident\n", grown);
        return grown > 5 && grown < 7.5 ? 5 : 1;
    }"#;
    ends_with_five("prefault-ahead", main);
}

/// Only the first MiB of each new mapping at the place of a watched block is used.
#[test]
fn watch_ends_with_each_change_of_a_block() {
    for change in [
        "munmap(block, 64 * MIB); RESERVE",
        "RESERVE",
        "mprotect(block, 64 * MIB, PROT_READ); mprotect(block, 64 * MIB, PROT_READ | PROT_WRITE); \
         madvise(block, 64 * MIB, MADV_DONTNEED)",
        "madvise(block, 64 * MIB, MADV_DONTNEED)",
        "char *other = mmap(0, 128 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); \
         mremap(block, 64 * MIB, 64 * MIB, MREMAP_MAYMOVE | MREMAP_FIXED, other); \
         munmap(other, 128 * MIB); RESERVE",
    ] {
        let main = format!(
            r#"
            #define RESERVE if (mmap(block, 64 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | \
                MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != block) return 2
            int main(void) {{
                for (int i = 0; i < 3; i++) {{
                    char *block = MAP(64 * MIB);
                    touch(block, 0, 1 * MIB);
                    {change};
                    double before = resident();
                    touch(block, 0, 2 * MIB);
                    pause_ms(100);
                    double grown = resident() - before;
                    if (grown > 2.5) {{ printf("%.1f MiB are resident\n", grown); return 1; }}
                    munmap(block, 64 * MIB);
                }}
                return 5;
            }}"#
        );
        ends_with_five("prefault-ahead", &main);
    }
}

/// Only the first 4 MiB of each mapping are used. No hook of `mmap` knows the new mappings.
#[test]
fn watch_ends_with_each_change_by_syscall_and_process_madvise() {
    const START: &str = r#"
    #include <dlfcn.h>
    #include <sys/syscall.h>
    #include <sys/uio.h>
    #define LEN (64L * MIB)
    #define RESERVED MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE
    #define RESERVE(flags) mmap(block, LEN, PROT_READ | PROT_WRITE, RESERVED | flags, -1, 0)
    #define FREE_PLACE 0x100000
    #define OTHER char *other = mmap(0, LEN, PROT_READ | PROT_WRITE, RESERVED, -1, 0)
    #define OWN int own = syscall(434, getpid(), 0); \
        struct iovec ranges[2] = { { block, MIB }, { block + MIB, LEN - MIB } }
    "#;
    for change in [
        "syscall(SYS_munmap, block, LEN); if (RESERVE(FREE_PLACE) != block) return 2",
        "if (syscall(SYS_mmap, block, LEN, 3L, (long)(RESERVED | MAP_FIXED), -1L, 0L) != (long)block) \
         return 2",
        "OTHER; if (syscall(SYS_mremap, block, LEN, LEN, 3L, other) != (long)other) return 2; \
         munmap(other, LEN); if (RESERVE(FREE_PLACE) != block) return 3",
        "OTHER; if (syscall(SYS_mremap, other, LEN, LEN, 3L, block) != (long)block) return 2",
        "if (syscall(SYS_mprotect, block, LEN, 1L) || syscall(SYS_mprotect, block, LEN, 3L)) return 2",
        "if (syscall(SYS_madvise, block, LEN, (long)MADV_DONTNEED)) return 2",
        "OWN; syscall(440, own, ranges, 2L, 20L, 0L); close(own)",
        "OWN; long (*call)(int, void *, long, int, int) = dlsym(RTLD_DEFAULT, \"process_madvise\"); \
         call(own, ranges, 2, 20, 0); close(own)",
    ] {
        let main = format!(
            r#"{START}
            int main(void) {{
                for (int i = 0; i < 2; i++) {{
                    double before = resident();
                    char *block = MAP(LEN);
                    touch(block, 0, 1 * MIB);
                    if (reaches(before, 1.4) < 1.4) return 4;
                    {change};
                    touch(block, 0, 4 * MIB);
                    pause_ms(100);
                    double grown = resident() - before;
                    if (grown > 5) {{ printf("%.1f MiB are resident\n", grown); return 1; }}
                    munmap(block, LEN);
                }}
                return 5;
            }}"#
        );
        ends_with_five("prefault-ahead", &main);
    }
}

#[test]
fn freed_blocks_can_be_used_again_by_many_threads() {
    let main = r"
    static void *work(void *number) {
        for (long i = 0; i < 60; i++) {
            long bytes = 5 * MIB + i * 100000;
            char *block = i % 2 ? malloc(bytes) : calloc(1, bytes), mark = (long)number * 3 + i;
            if (!block) exit(1);
            for (long at = 0; at < bytes; at += 4096) block[at] = mark;
            if (i % 3 == 0) block = realloc(block, bytes = 2 * bytes);
            for (long at = 0; at < 5 * MIB; at += 4096) if (block[at] != mark) exit(2);
            free(block);
        }
        return 0;
    }
    int main(void) {
        pthread_t threads[4];
        for (long i = 0; i < 4; i++) if (pthread_create(&threads[i], 0, work, (void *)i)) return 3;
        for (int i = 0; i < 4; i++) pthread_join(threads[i], 0);
        return 5;
    }";
    ends_with_five("prefault-ahead", main);
    ends_with_five("populate=1M,prefault-ahead,huge-text", main);
}

#[test]
fn forked_children_watch_their_own_blocks() {
    let main = r"int main(void) {
        char *block = malloc(64 * MIB);
        touch(block, 0, 2 * MIB);
        for (int i = 0; i < 3; i++) {
            pid_t child = fork();
            if (!child) {
                free(block);
                char *own = malloc(64 * MIB);
                double before = resident();
                touch(own, 0, 4 * MIB);
                _exit(reaches(before, 5) >= 5 ? 5 : 1);
            }
            int status;
            if (waitpid(child, &status, 0) != child || status != 5 << 8) return 2;
        }
        double before = resident();
        touch(block, 2 * MIB, 4 * MIB);
        return reaches(before, 2.5) >= 2.5 ? 5 : 3;
    }";
    ends_with_five("prefault-ahead", main);
}

#[test]
fn program_that_executes_itself_keeps_the_advice() {
    let main = r#"int main(int count, char **words) {
        char *block = malloc(64 * MIB);
        double before = resident();
        touch(block, 0, 4 * MIB);
        if (reaches(before, 5) < 5) return 1;
        if (count < 4) return execl("/proc/self/exe", "a", "b", "c", "d", (char *)0);
        return 5;
    }"#;
    ends_with_five("prefault-ahead", main);
}

/// The C libraries use the signals 32 to 34 between threads. `SIGKILL` and `SIGSTOP` are never
/// blocked.
#[test]
fn helper_blocks_the_signals_of_the_program_and_the_program_none() {
    let main = r#"
    #include <dirent.h>
    static unsigned long blocked(const char *thread) {
        char text[256];
        unsigned long signals = 1;
        snprintf(text, sizeof text, "/proc/self/task/%s/status", thread);
        FILE *file = fopen(text, "r");
        while (fgets(text, sizeof text, file)) sscanf(text, "SigBlk: %lx", &signals);
        fclose(file);
        return signals;
    }
    int main(void) {
        char own[16];
        int helpers = 0;
        char *volatile block = malloc(64 * MIB);
        pause_ms(50);
        snprintf(own, sizeof own, "%d", getpid());
        DIR *threads = opendir("/proc/self/task");
        for (struct dirent *thread; (thread = readdir(threads));) {
            if (thread->d_name[0] == '.') continue;
            unsigned long signals = blocked(thread->d_name);
            int is_helper = strcmp(thread->d_name, own) != 0;
            helpers += is_helper;
            printf("%d: %lx\n", is_helper, signals);
            if (signals != (is_helper ? ~(7UL << 31 | 1UL << 8 | 1UL << 18) : 0)) return 1;
        }
        return block && helpers == 1 ? 5 : 2;
    }"#;
    ends_with_five("prefault-ahead", main);
}

/// The helper must not keep a process alive, and must not run handlers of the program.
#[test]
fn helper_ends_with_the_last_thread_and_takes_no_signal() {
    let main = r#"
    #include <signal.h>
    #include <sys/syscall.h>
    static volatile long taken, wrong;
    static void handler(int number) {
        taken++;
        if (syscall(SYS_gettid) != getpid()) wrong++;
    }
    static void *last(void *unused) { pause_ms(20); return unused; }
    int main(int count, char **words) {
        char *block = malloc(64 * MIB);
        pthread_t thread;
        if (count > 1) {
            touch(block, 0, MIB);
            pthread_create(&thread, 0, last, 0);
            pthread_exit(words);
        }
        signal(SIGUSR1, handler);
        touch(block, 0, 2 * MIB);
        /* The kernel delivers a signal that this thread blocks to a thread that does not. */
        sigset_t set;
        sigemptyset(&set);
        sigaddset(&set, SIGUSR1);
        pthread_sigmask(SIG_BLOCK, &set, 0);
        kill(getpid(), SIGUSR1);
        touch(block, 2 * MIB, 4 * MIB);
        if (taken) return 1;
        pthread_sigmask(SIG_UNBLOCK, &set, 0);
        if (wrong || taken != 1) return 4;
        pid_t child = fork();
        /* In musl a forked child without exec never ends this way, also without the library. */
        if (!child) return execl("/proc/self/exe", "a", "b", (char *)0);
        for (int i = 0; i < 500; i++) {
            int status;
            if (waitpid(child, &status, WNOHANG) == child) return status ? 2 : 5;
            pause_ms(20);
        }
        kill(child, SIGKILL);
        return 3;
    }"#;
    ends_with_five("prefault-ahead", main);
}
