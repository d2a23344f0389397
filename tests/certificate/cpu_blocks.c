/* Logs every block that torch's CPU allocator takes and frees, on all threads. Preload it: LD_PRELOAD.

   torch takes each CPU block by one call of posix_memalign from libc10.so (c10/core/impl/alloc_cpu.cpp) and
   frees it by free(). So a block is what posix_memalign returns to libc10, from that call until the address
   is freed by whoever. Nothing is asked of torch: no profiler, no dispatch mode, no Python.

   The table of live blocks is an open hash table of addresses. The log has an entry for each allocation
   (bytes above 0) and each free (bytes below 0) while it is on. One mutex guards both; fork() holds it, so
   that a forked child can go on.

   cpu_blocks_log(1 or 0): start a new log, or stop it.
   cpu_blocks_live():      bytes alive now.
   cpu_blocks_entries():   the log; cpu_blocks_count(): how many entries, those past the capacity included. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#define SLOTS (1u << 20)
#define ENTRIES (1 << 20)
#define CALLERS 16

extern void __libc_free(void *);

typedef struct { uintptr_t address; int64_t bytes; } block;
typedef struct { int64_t bytes; int64_t thread; } entry;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static block *blocks;
static entry *entries;
static int64_t live, count;
static int logging, threads;
static __thread int thread = -1;

static void hold(void) { pthread_mutex_lock(&lock); }
static void release(void) { pthread_mutex_unlock(&lock); }

static void *pages(size_t bytes) {
  return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

__attribute__((constructor)) static void set_up(void) {
  blocks = pages(sizeof(block) * SLOTS);
  entries = pages(sizeof(entry) * ENTRIES);
  pthread_atfork(hold, release, release);
}

/* Whether an address of code is in libc10.so. Answers are kept by address; call it with the lock held. */
static int is_c10(uintptr_t caller) {
  static struct { uintptr_t caller; int answer; } known[CALLERS];
  static int next;
  Dl_info info;
  for (int i = 0; i < CALLERS; i++)
    if (known[i].caller == caller) return known[i].answer;
  int answer = dladdr((void *)caller, &info) && info.dli_fname && strstr(info.dli_fname, "libc10.so");
  known[next].caller = caller;
  known[next].answer = answer;
  next = (next + 1) % CALLERS;
  return answer;
}

static uint32_t home(uintptr_t address) { return (uint32_t)((address >> 6) * 2654435761u) & (SLOTS - 1); }

static void write_entry(int64_t bytes, int64_t who) {
  if (!logging) return;
  if (count < ENTRIES) entries[count] = (entry){bytes, who};
  count++;
}

static int64_t this_thread(void) {
  if (thread < 0) thread = threads++;
  return thread;
}

static void insert(uintptr_t address, int64_t bytes) {
  uint32_t i = home(address);
  while (blocks[i].address) i = (i + 1) & (SLOTS - 1);
  blocks[i] = (block){address, bytes};
}

/* Remove a block and close the gap, so that no chain of the table is cut. Returns its bytes, or -1. */
static int64_t take_out(uintptr_t address) {
  uint32_t i = home(address);
  while (blocks[i].address != address) {
    if (!blocks[i].address) return -1;
    i = (i + 1) & (SLOTS - 1);
  }
  int64_t bytes = blocks[i].bytes;
  for (uint32_t next = (i + 1) & (SLOTS - 1); blocks[next].address; next = (next + 1) & (SLOTS - 1)) {
    uint32_t distance = (next - home(blocks[next].address)) & (SLOTS - 1);
    if (distance >= ((next - i) & (SLOTS - 1))) {
      blocks[i] = blocks[next];
      i = next;
    }
  }
  blocks[i].address = 0;
  return bytes;
}

int posix_memalign(void **out, size_t alignment, size_t bytes) {
  static int (*original)(void **, size_t, size_t);
  if (!original) original = (int (*)(void **, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
  int failed = original(out, alignment, bytes);
  if (failed || alignment < 64 || !blocks) return failed;
  hold();
  if (is_c10((uintptr_t)__builtin_return_address(0))) {
    insert((uintptr_t)*out, (int64_t)bytes);
    live += (int64_t)bytes;
    write_entry((int64_t)bytes, this_thread());
  }
  release();
  return 0;
}

void free(void *memory) {
  uintptr_t address = (uintptr_t)memory;
  if (address && !(address & 63) && blocks) {
    hold();
    int64_t bytes = take_out(address);
    if (bytes >= 0) {
      live -= bytes;
      write_entry(-bytes, this_thread());
    }
    release();
  }
  __libc_free(memory);
}

int64_t cpu_blocks_live(void) { return live; }
int64_t cpu_blocks_count(void) { return count; }
const entry *cpu_blocks_entries(void) { return entries; }

void cpu_blocks_log(int on) {
  hold();
  if (on) count = 0;
  logging = on;
  release();
}
