/* Counts the blocks of torch's CPU allocator in the running process.
 *
 * libc10.so calls posix_memalign and free through slots of its own (its global offset table). These slots are
 * set to the functions below, which call the ones that stood there before. Only calls from libc10.so come
 * here, so nothing else in the process is counted or slowed. The slots stay set until the process ends.
 *
 * The table of live blocks has 64 parts with a lock each, in memory from mmap: nothing here calls the
 * functions that it counts. Bytes are those that libc10.so requests.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <malloc.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#define IS_SLOT(type) ((type) == R_X86_64_JUMP_SLOT || (type) == R_X86_64_GLOB_DAT)
#elif defined(__aarch64__)
#define IS_SLOT(type) ((type) == R_AARCH64_JUMP_SLOT || (type) == R_AARCH64_GLOB_DAT)
#else
#error "Only x86-64 and aarch64 are supported."
#endif

#define ALIGNMENT 64 /* c10::gAlignment: torch aligns every block of the CPU to at least this */
#define PARTS 64
#define FIRST_CAPACITY 1024
#define LEAST_UNKNOWN 256 /* libc10.so frees small objects of its own through the same slot */
#define MOST_WAITS (1 << 20)
#define MOST_SLOTS 16

typedef struct {
  uintptr_t address; /* 0: empty */
  int64_t bytes;
} block;

typedef struct {
  _Alignas(64) atomic_int lock;
  size_t used, capacity; /* capacity is a power of two */
  block *blocks;
} part;

/* An allocation (bytes > 0) or free (bytes < 0). `unknown` marks a free of a block that was allocated before
 * counting began; its bytes are then those that malloc can use, which are at least those that were requested. */
typedef struct {
  int64_t time_ns; /* since the epoch; 0: not written completely */
  uint64_t address;
  int64_t bytes;
  uint64_t unknown;
} call;

static part parts[PARTS];
static atomic_int counting, calls_on;
static atomic_int_fast64_t live, peak, blocks_live, unknown_frees, unknown_bytes, lost;
static call *calls;
static size_t calls_capacity;
static atomic_size_t calls_used;

typedef int (*memalign_function)(void **, size_t, size_t);
typedef void (*free_function)(void *);
static memalign_function next_memalign;
static free_function next_free;

typedef struct {
  void **at;
  void *ours;
} slot;
static slot slots[MOST_SLOTS];
static int slots_used;

/* Waits for a lock, but not for ever: a thread that was stopped while it held one must not stop another. */
static int lock(part *of) {
  for (int waits = 0; waits < MOST_WAITS; waits++) {
    int open = 0;
    if (atomic_compare_exchange_weak_explicit(&of->lock, &open, 1, memory_order_acquire, memory_order_relaxed))
      return 1;
    if (waits > 100) sched_yield();
  }
  atomic_fetch_add(&lost, 1);
  return 0;
}

static void unlock(part *of) { atomic_store_explicit(&of->lock, 0, memory_order_release); }

static uint64_t hash(uintptr_t address) { return (uint64_t)(address / ALIGNMENT) * 0x9E3779B97F4A7C15ull; }

static part *part_of(uintptr_t address) { return &parts[hash(address) >> 58]; }

static size_t first_place(const part *of, uintptr_t address) {
  return (hash(address) >> 20) & (of->capacity - 1);
}

static block *pages(size_t capacity) {
  void *memory = mmap(0, capacity * sizeof(block), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return memory == MAP_FAILED ? 0 : memory;
}

static size_t place_of(const part *of, uintptr_t address) {
  size_t place = first_place(of, address);
  while (of->blocks[place].address && of->blocks[place].address != address)
    place = (place + 1) & (of->capacity - 1);
  return place;
}

static int grow(part *of) {
  part larger = {.capacity = of->capacity ? 2 * of->capacity : FIRST_CAPACITY};
  larger.blocks = pages(larger.capacity);
  if (!larger.blocks) return 0;
  for (size_t place = 0; place < of->capacity; place++)
    if (of->blocks[place].address) larger.blocks[place_of(&larger, of->blocks[place].address)] = of->blocks[place];
  if (of->blocks) munmap(of->blocks, of->capacity * sizeof(block));
  of->blocks = larger.blocks;
  of->capacity = larger.capacity;
  return 1;
}

static void write_call(uintptr_t address, int64_t bytes, int unknown) {
  if (!atomic_load_explicit(&calls_on, memory_order_relaxed)) return;
  size_t row = atomic_fetch_add(&calls_used, 1);
  if (row >= calls_capacity) return; /* the reader sees that more were made than fit */
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  calls[row].address = address;
  calls[row].bytes = bytes;
  calls[row].unknown = unknown;
  calls[row].time_ns = now.tv_sec * 1000000000ll + now.tv_nsec;
}

static void change(int64_t bytes, int64_t count) {
  int64_t level = atomic_fetch_add(&live, bytes) + bytes;
  atomic_fetch_add(&blocks_live, count);
  int64_t highest = atomic_load(&peak);
  while (level > highest && !atomic_compare_exchange_weak(&peak, &highest, level)) {
  }
}

static void add(uintptr_t address, int64_t bytes) {
  part *of = part_of(address);
  if (!lock(of)) return;
  if (2 * (of->used + 1) > of->capacity && !grow(of) && of->used + 1 >= of->capacity) {
    atomic_fetch_add(&lost, 1);
  } else {
    block *found = &of->blocks[place_of(of, address)];
    if (found->address) { /* freed by a call that does not come here */
      atomic_fetch_add(&lost, 1);
      change(-found->bytes, -1);
    } else {
      of->used++;
    }
    *found = (block){address, bytes};
    change(bytes, 1);
    write_call(address, bytes, 0);
  }
  unlock(of);
}

/* Empties a place, and moves the blocks behind it that would not be found otherwise. */
static void empty(part *of, size_t place) {
  size_t mask = of->capacity - 1, next = place;
  for (;;) {
    of->blocks[place].address = 0;
    size_t first;
    do {
      next = (next + 1) & mask;
      if (!of->blocks[next].address) return;
      first = first_place(of, of->blocks[next].address);
    } while (((next - first) & mask) < ((next - place) & mask));
    of->blocks[place] = of->blocks[next];
    place = next;
  }
}

static void forget(void *memory) {
  uintptr_t address = (uintptr_t)memory;
  part *of = part_of(address);
  if (!lock(of)) return;
  size_t place = of->capacity ? place_of(of, address) : 0;
  if (of->capacity && of->blocks[place].address) {
    int64_t bytes = of->blocks[place].bytes;
    empty(of, place);
    of->used--;
    change(-bytes, -1);
    write_call(address, -bytes, 0);
  } else {
    int64_t bytes = malloc_usable_size(memory);
    if (bytes >= LEAST_UNKNOWN) {
      atomic_fetch_add(&unknown_frees, 1);
      atomic_fetch_add(&unknown_bytes, bytes);
      write_call(address, -bytes, 1);
    }
  }
  unlock(of);
}

static int counted_memalign(void **memory, size_t alignment, size_t bytes) {
  int result = next_memalign(memory, alignment, bytes);
  if (!result && *memory && alignment >= ALIGNMENT && atomic_load_explicit(&counting, memory_order_acquire)) {
    int before = errno;
    add((uintptr_t)*memory, (int64_t)bytes);
    errno = before;
  }
  return result;
}

static void counted_free(void *memory) {
  if (memory && !((uintptr_t)memory % ALIGNMENT) && atomic_load_explicit(&counting, memory_order_acquire)) {
    int before = errno;
    forget(memory);
    errno = before;
  }
  next_free(memory);
}

/* A fork has one thread. If another one held a lock, what it was changing is in no order: counting ends. */
static void in_child(void) {
  for (int number = 0; number < PARTS; number++)
    if (atomic_exchange(&parts[number].lock, 0)) {
      atomic_store(&counting, 0);
      atomic_fetch_add(&lost, 1);
    }
}

typedef struct {
  int problem, of_memalign, of_free;
} search;

/* glibc has added the base address to these entries; other C libraries leave the file's own. */
static void *pointer(const struct dl_phdr_info *library, ElfW(Addr) value) {
  return (void *)(value < library->dlpi_addr ? library->dlpi_addr + value : value);
}

static int is_within(const struct dl_phdr_info *library, void *address) {
  for (int number = 0; number < library->dlpi_phnum; number++) {
    const ElfW(Phdr) *segment = &library->dlpi_phdr[number];
    uintptr_t start = library->dlpi_addr + segment->p_vaddr;
    if (segment->p_type == PT_LOAD && (uintptr_t)address - start < segment->p_memsz) return 1;
  }
  return 0;
}

static int is_read_only(const struct dl_phdr_info *library, void *address) {
  uintptr_t page = ~(uintptr_t)(sysconf(_SC_PAGESIZE) - 1);
  for (int number = 0; number < library->dlpi_phnum; number++) {
    const ElfW(Phdr) *segment = &library->dlpi_phdr[number];
    uintptr_t start = library->dlpi_addr + segment->p_vaddr;
    if (segment->p_type == PT_GNU_RELRO && (uintptr_t)address >= (start & page) &&
        (uintptr_t)address < ((start + segment->p_memsz) & page))
      return 1;
  }
  return 0;
}

static int set_slot(const struct dl_phdr_info *library, void **at, void *ours) {
  if (slots_used == MOST_SLOTS) return 0;
  size_t size = (size_t)sysconf(_SC_PAGESIZE);
  void *page = (void *)((uintptr_t)at & ~(uintptr_t)(size - 1));
  if (mprotect(page, size, PROT_READ | PROT_WRITE)) return 0;
  __atomic_store_n(at, ours, __ATOMIC_RELEASE);
  if (is_read_only(library, at)) mprotect(page, size, PROT_READ);
  slots[slots_used++] = (slot){at, ours};
  return 1;
}

/* The function in a slot. A slot that was never used holds a stub of libc10.so, which would overwrite it. */
static void *function_in(const struct dl_phdr_info *library, void **at, const char *name) {
  void *function = __atomic_load_n(at, __ATOMIC_ACQUIRE);
  return !function || is_within(library, function) ? dlsym(RTLD_DEFAULT, name) : function;
}

static void set_slots(const struct dl_phdr_info *library, const ElfW(Rela) *rows, size_t count,
                      const ElfW(Sym) *symbols, const char *names, search *done, int frees) {
  for (size_t row = 0; row < count; row++) {
    if (!IS_SLOT(ELF64_R_TYPE(rows[row].r_info))) continue;
    const char *name = names + symbols[ELF64_R_SYM(rows[row].r_info)].st_name;
    void **at = (void **)(library->dlpi_addr + rows[row].r_offset);
    int is_free = !strcmp(name, "free");
    if (is_free != frees || !(is_free || !strcmp(name, "posix_memalign"))) continue;
    void *next = function_in(library, at, name);
    void *ours = is_free ? (void *)counted_free : (void *)counted_memalign;
    if (!next || next == ours) {
      done->problem = 1;
      continue;
    }
    if (is_free) next_free = (free_function)next;
    else next_memalign = (memalign_function)next;
    if (!set_slot(library, at, ours)) done->problem = 1;
    else if (is_free) done->of_free++;
    else done->of_memalign++;
  }
}

static int visit(struct dl_phdr_info *library, size_t size, void *data) {
  (void)size;
  const char *base = library->dlpi_name ? strrchr(library->dlpi_name, '/') : 0;
  if (strcmp(base ? base + 1 : library->dlpi_name ? library->dlpi_name : "", "libc10.so")) return 0;
  const ElfW(Dyn) *entry = 0;
  for (int number = 0; number < library->dlpi_phnum; number++)
    if (library->dlpi_phdr[number].p_type == PT_DYNAMIC)
      entry = (void *)(library->dlpi_addr + library->dlpi_phdr[number].p_vaddr);
  const ElfW(Rela) *lazy = 0, *eager = 0;
  const ElfW(Sym) *symbols = 0;
  const char *names = 0;
  size_t lazy_bytes = 0, eager_bytes = 0;
  for (; entry && entry->d_tag != DT_NULL; entry++) {
    if (entry->d_tag == DT_JMPREL) lazy = pointer(library, entry->d_un.d_ptr);
    if (entry->d_tag == DT_PLTRELSZ) lazy_bytes = entry->d_un.d_val;
    if (entry->d_tag == DT_RELA) eager = pointer(library, entry->d_un.d_ptr);
    if (entry->d_tag == DT_RELASZ) eager_bytes = entry->d_un.d_val;
    if (entry->d_tag == DT_SYMTAB) symbols = pointer(library, entry->d_un.d_ptr);
    if (entry->d_tag == DT_STRTAB) names = pointer(library, entry->d_un.d_ptr);
  }
  if (!symbols || !names) return 1;
  for (int frees = 1; frees >= 0; frees--) { /* frees first: a block that is counted is never missed later */
    if (eager) set_slots(library, eager, eager_bytes / sizeof *eager, symbols, names, data, frees);
    if (lazy) set_slots(library, lazy, lazy_bytes / sizeof *lazy, symbols, names, data, frees);
  }
  return 1;
}

/* Sets the slots, once. Returns 0, or 1 if a slot that is needed does not exist or cannot be set: then the
 * functions here only call the next ones. */
int tbm_start(void) {
  static int is_tried, is_ready;
  if (!is_tried) {
    search done = {0};
    is_tried = 1;
    dl_iterate_phdr(visit, &done);
    is_ready = !done.problem && done.of_free && done.of_memalign;
    if (!is_ready) return 1;
    pthread_atfork(0, 0, in_child);
    size_t capacity = (size_t)1 << 24;
    for (; !calls && capacity > 1 << 16; capacity /= 2) { /* only pages that are written take memory */
      void *memory = mmap(0, capacity * sizeof(call), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory != MAP_FAILED) {
        calls = memory;
        calls_capacity = capacity;
      }
    }
  }
  atomic_store_explicit(&counting, is_ready, memory_order_release);
  return !is_ready;
}

/* Ends counting for good: what is freed from now on is not seen. */
void tbm_stop(void) {
  atomic_store(&counting, 0);
  atomic_fetch_add(&lost, 1);
}

/* Whether all calls still come here, and none was lost. */
int tbm_is_exact(void) {
  for (int number = 0; number < slots_used; number++)
    if (__atomic_load_n(slots[number].at, __ATOMIC_ACQUIRE) != slots[number].ours) return 0;
  return atomic_load(&counting) && !atomic_load(&lost);
}

/* Counts a block that was allocated before counting began. Returns whether it was new. */
int tbm_adopt(uint64_t address, int64_t bytes) {
  part *of = part_of(address);
  if (!lock(of)) return 0;
  int known = of->capacity && of->blocks[place_of(of, address)].address;
  unlock(of);
  if (!known) add(address, bytes);
  return !known;
}

/* live bytes, their peak, live blocks, frees of unknown blocks, their usable bytes, calls that were lost */
void tbm_figures(int64_t *figures) {
  figures[0] = atomic_load(&live);
  figures[1] = atomic_load(&peak);
  figures[2] = atomic_load(&blocks_live);
  figures[3] = atomic_load(&unknown_frees);
  figures[4] = atomic_load(&unknown_bytes);
  figures[5] = atomic_load(&lost);
}

void tbm_reset_peak(void) { atomic_store(&peak, atomic_load(&live)); }

/* Writes the live blocks of one moment and returns their number, which may be larger than `capacity`; nothing
 * is written then. `figures` are those of the same moment. With `begin`, the peak counts from it, and calls
 * are written from it on. */
int64_t tbm_blocks(uint64_t *addresses, int64_t *bytes, int64_t capacity, int64_t *figures, int begin) {
  int held = 0;
  while (held < PARTS && lock(&parts[held])) held++;
  int64_t count = 0;
  if (held == PARTS) {
    count = atomic_load(&blocks_live);
    if (count <= capacity) {
      int64_t row = 0;
      for (int number = 0; number < PARTS; number++)
        for (size_t place = 0; place < parts[number].capacity; place++)
          if (parts[number].blocks[place].address) {
            addresses[row] = parts[number].blocks[place].address;
            bytes[row++] = parts[number].blocks[place].bytes;
          }
      if (begin) {
        tbm_reset_peak();
        atomic_store(&calls_on, calls_capacity > 0);
      }
      tbm_figures(figures);
    }
  }
  while (held) unlock(&parts[--held]);
  return count;
}

/* The number of calls since they began to be written, and where they are; more may be counted than fit. */
size_t tbm_calls(call **rows, size_t *capacity) {
  *rows = calls;
  *capacity = calls_capacity;
  return atomic_load(&calls_used);
}

/* Ends the writing of calls and gives their memory back. */
void tbm_end_calls(void) {
  int held = 0;
  while (held < PARTS && lock(&parts[held])) held++;
  atomic_store(&calls_on, 0);
  atomic_store(&calls_used, 0);
  while (held) unlock(&parts[--held]);
  if (calls) madvise(calls, calls_capacity * sizeof(call), MADV_DONTNEED);
}
