/* Uses the C library and its system calls. The output is the same on every system. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <locale.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int compare(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int turns;
static _Thread_local int own = 3;

static void *thread(void *argument) {
    int me = (int)(long)argument;
    own += me;
    for (int i = 0; i < 1000; i++) {
        pthread_mutex_lock(&lock);
        turns++;
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&lock);
    }
    return (void *)(long)own;
}

static sigjmp_buf back;
static void on_fault(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)context;
    siglongjmp(back, info->si_addr == (void *)16 ? 1 : 2);
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOFBF, 4096);
    for (int i = 1; i < argc; i++) printf("argument %d: '%s'\n", i, argv[i]);
    printf("variable %s\n", getenv("VARIABLE"));
    printf("numbers %d %.6f %e %g %s\n", -42, M_PI, 1e100, sqrt(2.0), "text");

    /* Small and large allocations. */
    enum { COUNT = 2000 };
    char **blocks = calloc(COUNT, sizeof *blocks);
    size_t total = 0;
    for (int i = 0; i < COUNT; i++) {
        size_t size = (size_t)(i * 37 % 5000 + 1) * (i % 100 == 0 ? 100 : 1);
        blocks[i] = malloc(size);
        memset(blocks[i], i, size);
        total += size;
    }
    for (int i = 0; i < COUNT; i += 2) blocks[i] = realloc(blocks[i], 9000);
    for (int i = 0; i < COUNT; i++)
        if (blocks[i][0] != (char)i) printf("block %d is wrong\n", i);
    for (int i = 0; i < COUNT; i++) free(blocks[i]);
    free(blocks);
    printf("allocated %zu\n", total);

    int *numbers = malloc(100000 * sizeof *numbers);
    srand(1);
    unsigned seed = 1;
    for (int i = 0; i < 100000; i++) numbers[i] = (int)((seed = seed * 1103515245 + 12345) >> 8);
    qsort(numbers, 100000, sizeof *numbers, compare);
    for (int i = 1; i < 100000; i++)
        if (numbers[i - 1] > numbers[i]) printf("not sorted at %d\n", i);
    printf("sorted %d..%d\n", numbers[0], numbers[99999]);
    free(numbers);

    pthread_t threads[4];
    for (long i = 0; i < 4; i++)
        if (pthread_create(&threads[i], NULL, thread, (void *)i)) printf("no thread %ld\n", i);
    pthread_mutex_lock(&lock);
    while (turns < 4000) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    long sum = 0;
    for (int i = 0; i < 4; i++) {
        void *result;
        pthread_join(threads[i], &result);
        sum += (long)result;
    }
    printf("threads %d %ld %d\n", turns, sum, own);

    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, NULL);
    for (int i = 0; i < 3; i++) {
        int how = sigsetjmp(back, 1);
        if (how == 0) *(volatile char *)16 = 1;
        printf("fault %d\n", how);
    }

    fflush(stdout);
    int ends[2];
    if (pipe(ends)) return 1;
    pid_t child = fork();
    if (child == 0) {
        FILE *out = fdopen(ends[1], "w");
        close(ends[0]);
        for (int i = 0; i < 20000; i++) fprintf(out, "line %d\n", i);
        fclose(out);
        _exit(5);
    }
    close(ends[1]);
    FILE *in = fdopen(ends[0], "r");
    char line[64];
    int lines = 0;
    while (fgets(line, sizeof line, in)) lines++;
    int status;
    waitpid(child, &status, 0);
    printf("child %d lines %d last %s", WEXITSTATUS(status), lines, line);
    fclose(in);

    char name[] = "/tmp/programXXXXXX";
    int fd = mkstemp(name);
    FILE *file = fdopen(fd, "w+");
    for (int i = 0; i < 10000; i++) fprintf(file, "%05d\n", i);
    fflush(file);
    struct stat about;
    fstat(fd, &about);
    char *mapped = mmap(NULL, (size_t)about.st_size, PROT_READ, MAP_SHARED, fd, 0);
    printf("file %ld %.5s %.5s\n", (long)about.st_size, mapped, mapped + 9999 * 6);
    munmap(mapped, (size_t)about.st_size);
    fclose(file);
    unlink(name);
    printf("gone %d\n", access(name, F_OK) == -1 && errno == ENOENT);

    time_t now = 86400 * 365;
    char text[64];
    strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", gmtime(&now));
    printf("time %s\n", text);
    struct timespec short_time = {0, 2000000}, before, after;
    clock_gettime(CLOCK_MONOTONIC, &before);
    nanosleep(&short_time, NULL);
    clock_gettime(CLOCK_MONOTONIC, &after);
    long slept = (after.tv_sec - before.tv_sec) * 1000000000L + after.tv_nsec - before.tv_nsec;
    printf("slept %d\n", slept >= 2000000);
    fputs("to standard error\n", stderr);
    puts("done");
    return 0;
}
