/* A process, its child and its grandchild. Each allocates its own memory with malloc, some at the start and some later.
 * Each prints "PID ready" once it has all its memory, and keeps it until standard input closes.
 *
 * tree MIB GENERATIONS */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static const size_t KIB = 1024, MIB = 1024 * 1024;

static void allocate(size_t bytes, size_t chunk) {
    for (size_t done = 0; done < bytes; done += chunk) {
        char *part = malloc(chunk);
        if (!part) exit(1);
        memset(part, 0x5a, chunk);
    }
}

int main(int count, char **words) {
    if (count != 3) return 2;
    size_t bytes = (size_t)atoi(words[1]) * MIB;
    int generations = atoi(words[2]);
    allocate(bytes / 4, 3 * MIB);
    allocate(bytes / 4, 3 * KIB);
    pid_t child = generations > 1 ? fork() : 0;
    if (generations > 1 && child == 0) {
        char left[16];
        snprintf(left, sizeof left, "%d", generations - 1);
        /* Every other generation executes a new program. */
        if (generations % 2) execl(words[0], words[0], words[1], left, (char *)0);
    }
    usleep(100 * 1000);
    allocate(bytes / 4, 5 * MIB);
    allocate(bytes / 4, 700);
    printf("%d ready\n", (int)getpid());
    fflush(stdout);
    char byte;
    while (read(0, &byte, 1) > 0) {}
    if (child > 0) waitpid(child, 0, 0);
    return 0;
}
