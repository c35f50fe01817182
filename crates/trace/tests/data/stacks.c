/* The program of the fixtures with call stacks, which the recorder started as /tmp/st/stacks, compiled with frame
   pointers (stacks) and without (stacks-tables):
   gcc -O0 -static -nostdlib -no-pie -Wl,-z,noseparate-code -Wl,--build-id=none stacks.c -o stacks
   gcc -O1 -fomit-frame-pointer -fno-optimize-sibling-calls -static -nostdlib -no-pie -Wl,-z,noseparate-code
       -Wl,--build-id=none stacks.c -o stacks-tables
   perf record -q -N -B -c 1 -d --user-callchains -e 'page-faults/call-graph=fp/u' ./stacks
   perf record -q -N -B -c 1 -d --user-callchains -e 'page-faults/call-graph=dwarf,stack-size=256/u' ./stacks */
static char area[64 << 12];

__attribute__((noinline)) static void touch(int page) {
    ((volatile char *)area)[page << 12] = 1;
    __asm__ volatile("");
}

__attribute__((noinline)) static void eight(void) {
    for (int page = 0; page < 8; page++) {
        touch(page);
    }
    __asm__ volatile("");
}

__attribute__((noinline)) static void one(void) {
    touch(9);
    __asm__ volatile("");
}

void _start(void) {
    eight();
    one();
    __asm__ volatile("syscall" ::"a"(60), "D"(0));
}
