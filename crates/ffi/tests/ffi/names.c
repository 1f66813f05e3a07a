/* A thread exits with a name that it pushed and did not pop, after one pop too many. With an argument, the thread is
   the main thread. */
#include "stratalloc.h"

#include <pthread.h>
#include <stdio.h>

static void *leave_open(void *wrong) {
    if (stratalloc_context_pop() != STRATALLOC_STATUS_INVALID_ARGUMENT) *(int *)wrong = 1;
    if (stratalloc_context_push("region") != STRATALLOC_STATUS_OK) *(int *)wrong = 2;
    if (stratalloc_compile_context_pop() != STRATALLOC_STATUS_INVALID_ARGUMENT) *(int *)wrong = 3;
    if (stratalloc_compile_context_push("compiled") != STRATALLOC_STATUS_OK) *(int *)wrong = 4;
    return NULL;
}

int main(int count, char **arguments) {
    int wrong = 0;
    pthread_t thread;
    (void)arguments;
    if (count > 1) {
        leave_open(&wrong);
    } else {
        pthread_create(&thread, NULL, leave_open, &wrong);
        pthread_join(thread, NULL);
    }
    if (wrong == 0) puts("good");
    return wrong;
}
