/* PyTorch's functions with an invalid configuration in the environment: they return null with a message, and do not
   crash. */
#include "stratalloc.h"

#include <stdio.h>

int main(void) {
    stratalloc_torch_init(1);
    void *first = stratalloc_torch_malloc(64, 0, NULL);
    void *second = stratalloc_torch_malloc(64, 0, NULL);
    stratalloc_torch_free(&first, 64, 0, NULL);
    stratalloc_torch_reset();
    char text[256];
    if (first || second || stratalloc_last_error(text, sizeof text) < 2) return 1;
    puts("good");
    return 0;
}
