/* Preloaded: the bytes that libc10.so has alive, counted by a list of its own, to hold the counter against.
 * Build: cc -O1 -shared -fPIC oracle.c -o oracle.so -ldl -lpthread */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

extern void __libc_free(void *);

#define MOST 65536
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static void *address[MOST];
static size_t size[MOST];
static int64_t total, highest;

/* The counter's functions call on in place of libc10.so. */
static int is_torch(void *caller) {
  Dl_info library;
  return dladdr(caller, &library) && library.dli_fname &&
         (strstr(library.dli_fname, "libc10.so") || strstr(library.dli_fname, "allocator_calls"));
}

int posix_memalign(void **memory, size_t alignment, size_t bytes) {
  static int (*next)(void **, size_t, size_t);
  if (!next) next = (int (*)(void **, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
  int failed = next(memory, alignment, bytes);
  if (failed || !is_torch(__builtin_return_address(0))) return failed;
  pthread_mutex_lock(&mutex);
  for (int row = 0; row < MOST; row++)
    if (!address[row]) {
      address[row] = *memory;
      size[row] = bytes;
      total += bytes;
      if (total > highest) highest = total;
      break;
    }
  pthread_mutex_unlock(&mutex);
  return 0;
}

void free(void *memory) {
  if (memory && total) {
    pthread_mutex_lock(&mutex);
    for (int row = 0; row < MOST; row++)
      if (address[row] == memory) {
        total -= size[row];
        address[row] = 0;
        break;
      }
    pthread_mutex_unlock(&mutex);
  }
  __libc_free(memory);
}

int64_t oracle_live(void) { return total; }
int64_t oracle_peak(void) { return highest; }
void oracle_reset(void) { highest = total; }
