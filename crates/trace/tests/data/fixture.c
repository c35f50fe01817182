/* What the fixtures in tests/data record: a thread, a fork that copies on write, a vfork that
   executes a program, mremap, madvise, mprotect, brk, a failing mmap, a read by the kernel into a
   fresh buffer, and a fault that ends in a signal. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static char *area;
static sigjmp_buf back;

static void on_fault(int signal) { siglongjmp(back, signal); }

static void *thread(void *arg) {
    char *own = mmap(0, 4 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(own, 1, 4 * 4096);
    area[4096] = 1;
    munmap(own, 4 * 4096);
    return arg;
}

int main(int argc, char **argv) {
    if (argc > 1) return 0;
    area = mmap(0, 8 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    area[0] = 1;
    mmap(0, 0, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    pthread_t other;
    pthread_create(&other, 0, thread, 0);
    pthread_join(other, 0);
    int zero = open("/dev/zero", O_RDONLY);
    read(zero, area + 2 * 4096, 4096);
    if (fork() == 0) {
        area[0] = 2;
        _exit(0);
    }
    wait(0);
    char *args[] = {argv[0], "child", 0};
    if (vfork() == 0) {
        execv(argv[0], args);
        _exit(1);
    }
    wait(0);
    area = mremap(area, 8 * 4096, 512 * 4096, MREMAP_MAYMOVE);
    area[300 * 4096] = 1;
    madvise(area, 4096, MADV_DONTNEED);
    area[0] = 3;
    mprotect(area, 4096, PROT_READ);
    signal(SIGSEGV, on_fault);
    if (sigsetjmp(back, 1) == 0) area[0] = 4;
    *(char *)sbrk(4096) = 1;
    return 0;
}
