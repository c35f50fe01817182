/* Rounds of work: a large batch of blocks is filled and freed, then time passes, and small blocks drive the allocator's clock. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 20, mib = argc > 2 ? atoi(argv[2]) : 64, pause = argc > 3 ? atoi(argv[3]) : 100;
    unsigned long sum = 0;
    int count = mib * 16;
    unsigned char **all = calloc(count, sizeof *all);
    for (int r = 0; r < rounds; r++) {
        for (int i = 0; i < count; i++) { all[i] = malloc(65536 - 64); memset(all[i], i | 1, 65536 - 64); }
        for (int i = 0; i < count; i++) { sum += all[i][1000]; free(all[i]); }
        usleep(pause * 1000);
        for (int i = 0; i < 20000; i++) { unsigned char *p = malloc(64); *p = i; sum += *p; free(p); }
    }
    printf("%lu\n", sum);
}
