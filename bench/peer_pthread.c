/* The process-shared barrier of C, the reference for a barrier between processes.
 * usage: peer_pthread RANKS ROUNDS; prints microseconds per barrier. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

int main(int argc, char **argv) {
    int ranks = argc > 1 ? atoi(argv[1]) : 2, rounds = argc > 2 ? atoi(argv[2]) : 10000;
    pthread_barrier_t *barrier = mmap(NULL, sizeof *barrier, PROT_READ | PROT_WRITE,
                                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_barrierattr_t shared;
    struct timespec begin, end;
    pthread_barrierattr_init(&shared);
    pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(barrier, &shared, ranks);
    int rank = 0;
    for (int other = 1; other < ranks; other++)
        if (fork() == 0) { rank = other; break; }
    pthread_barrier_wait(barrier);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int k = 0; k < rounds; k++) pthread_barrier_wait(barrier);
    clock_gettime(CLOCK_MONOTONIC, &end);
    if (rank != 0) return 0;
    while (wait(NULL) > 0) {}
    printf("%f\n", ((end.tv_sec - begin.tv_sec) * 1e9 + (end.tv_nsec - begin.tv_nsec)) / 1e3 / rounds);
    return 0;
}
