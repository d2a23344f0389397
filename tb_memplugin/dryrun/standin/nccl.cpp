// NCCL between processes of this machine: messages arrive, through files, so that ranks learn what others tell them
// (numbers, shapes, objects, which are bytes). Other long ones are data of kernels, which nobody wrote: they are said to
// have arrived.
#include <dlfcn.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr size_t kLongestMessage = 64 << 10, kLongestObject = 256 << 20;
constexpr int kSystemError = 2;
constexpr std::chrono::seconds kPatience(120);

// Bytes of an element of each ncclDataType_t.
constexpr size_t kElement[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

struct UniqueId { char bytes[128]; };

struct Communicator {
    std::string folder;
    int ranks, rank, splits = 0;
    std::map<int, size_t> sent, received;  // messages so far, by the other rank
};

struct Message { Communicator* group; int other; void* at; size_t bytes; };

// Bytes and characters (ncclInt8, ncclUint8) are objects: they arrive whatever their length.
bool arrives(size_t bytes, int type) { return bytes <= (type <= 1 ? kLongestObject : kLongestMessage); }

thread_local int depth = 0;
thread_local std::vector<Message> expected;  // receives of the open group

std::string path(const Communicator& group, int from, int to, size_t number) {
    return group.folder + "/" + std::to_string(from) + "-" + std::to_string(to) + "-" + std::to_string(number);
}

// Whether bytes have values, and what becomes of those that they are written over (values.cpp, where it is loaded).
bool has_values(const void* at, size_t bytes) {
    static auto known = reinterpret_cast<int (*)(uintptr_t, size_t)>(dlsym(RTLD_DEFAULT, "tb_memplugin_values_known"));
    return !known || known(uintptr_t(at), bytes);
}
void set_values(const void* at, size_t bytes, bool known) {
    static auto set = reinterpret_cast<void (*)(uintptr_t, size_t, int)>(dlsym(RTLD_DEFAULT, "tb_memplugin_values_set"));
    if (set) set(uintptr_t(at), bytes, known);
}

// A message is whether it has values, and its bytes.
int send(Communicator& group, int to, const void* at, size_t bytes, bool known) {
    std::string name = path(group, group.rank, to, group.sent[to]++), unfinished = name + ".unfinished";
    std::ofstream(unfinished, std::ios::binary).put(known).write(static_cast<const char*>(at), std::streamsize(bytes));
    return std::rename(unfinished.c_str(), name.c_str()) ? kSystemError : 0;
}

int receive(const Message& it) {
    std::string name = path(*it.group, it.other, it.group->rank, it.group->received[it.other]++);
    auto end = std::chrono::steady_clock::now() + kPatience;
    while (access(name.c_str(), R_OK)) {
        if (std::chrono::steady_clock::now() > end) return kSystemError;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::ifstream file(name, std::ios::binary);
    const bool known = file.get() == 1;
    file.read(static_cast<char*>(it.at), std::streamsize(it.bytes));
    set_values(it.at, it.bytes, known);
    return std::remove(name.c_str()) ? kSystemError : 0;
}

int begin(void** out, const std::string& folder, int ranks, int rank) {
    std::error_code ignored;  // another rank may have made it
    std::filesystem::create_directories(folder, ignored);
    *out = new Communicator{folder, ranks, rank};
    return 0;
}

}  // namespace

extern "C" {

int ncclGetVersion(int* version) { *version = 22900; return 0; }
const char* ncclGetErrorString(int) { return "not in the stand-in, or another rank did not answer"; }
const char* ncclGetLastError(void*) { return ""; }
int ncclGetUniqueId(UniqueId* id) {
    static int made = 0;
    std::memset(id, 0, sizeof *id);
    auto now = (long long)(std::chrono::system_clock::now().time_since_epoch().count());
    const char* folder = std::getenv("STANDIN_FOLDER");
    std::snprintf(id->bytes, sizeof id->bytes, "%s/nccl-%lld-%d-%d",
                  folder ? folder : std::filesystem::temp_directory_path().c_str(), now, int(getpid()), made++);
    return 0;
}
int ncclCommInitRank(void** out, int ranks, UniqueId id, int rank) { return begin(out, id.bytes, ranks, rank); }
int ncclCommInitRankConfig(void** out, int ranks, UniqueId id, int rank, void*) { return begin(out, id.bytes, ranks, rank); }
int ncclCommInitRankScalable(void** out, int ranks, int rank, int, UniqueId* id, void*) {
    return begin(out, id->bytes, ranks, rank);
}
int ncclCommCount(Communicator* it, int* count) { *count = it->ranks; return 0; }
int ncclCommUserRank(Communicator* it, int* rank) { *rank = it->rank; return 0; }
int ncclCommGetAsyncError(void*, int* error) { *error = 0; return 0; }

int ncclGroupStart() { ++depth; return 0; }
int ncclGroupEnd() {
    if (--depth) return 0;
    std::vector<Message> now;
    now.swap(expected);
    for (const Message& it : now)
        if (int error = receive(it)) return error;
    return 0;
}
int ncclSend(const void* from, size_t count, int type, int to, Communicator* it, void*) {
    const size_t bytes = count * kElement[type];
    return arrives(bytes, type) ? send(*it, to, from, bytes, has_values(from, bytes)) : 0;
}
int ncclRecv(void* to, size_t count, int type, int from, Communicator* it, void*) {
    Message message{it, from, to, count * kElement[type]};
    if (!arrives(message.bytes, type)) { set_values(to, message.bytes, false); return 0; }
    if (!depth) return receive(message);
    expected.push_back(message);
    return 0;
}
int ncclAlltoAll(const void* from, void* to, size_t count, int type, Communicator* it, void* stream) {
    const size_t bytes = count * kElement[type];
    ncclGroupStart();
    for (int rank = 0; rank < it->ranks; ++rank) {
        ncclSend(static_cast<const char*>(from) + bytes * size_t(rank), count, type, rank, it, stream);
        ncclRecv(static_cast<char*>(to) + bytes * size_t(rank), count, type, rank, it, stream);
    }
    return ncclGroupEnd();
}
int ncclAllGather(const void* from, void* to, size_t count, int type, Communicator* it, void* stream) {
    const size_t bytes = count * kElement[type];
    if (!arrives(bytes, type)) { set_values(to, bytes * size_t(it->ranks), false); return 0; }
    const bool known = has_values(from, bytes);
    ncclGroupStart();
    for (int rank = 0; rank < it->ranks; ++rank) {
        if (int error = send(*it, rank, from, bytes, known)) return error;
        ncclRecv(static_cast<char*>(to) + bytes * size_t(rank), count, type, rank, it, stream);
    }
    return ncclGroupEnd();
}
int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, Communicator* it, void* stream) {
    if (it->rank != root) return ncclRecv(to, count, type, root, it, stream);
    for (int rank = 0; rank < it->ranks; ++rank)
        if (rank != root) ncclSend(from, count, type, rank, it, stream);
    if (from != to && arrives(count * kElement[type], type)) {
        std::memcpy(to, from, count * kElement[type]);
        set_values(to, count * kElement[type], has_values(from, count * kElement[type]));
    }
    return 0;
}
int ncclBcast(void* at, size_t count, int type, int root, Communicator* it, void* stream) {
    return ncclBroadcast(at, at, count, type, root, it, stream);
}
int ncclCommSplit(Communicator* it, int color, int key, void** out, void*) {
    struct Wish { int color, key; } wish{color, key};
    std::vector<Wish> all(size_t(it->ranks));
    if (int error = ncclAllGather(&wish, all.data(), sizeof wish, 0, it, nullptr)) return error;
    int ranks = 0, rank = 0;
    for (int other = 0; other < it->ranks; ++other) {
        const Wish& its = all[size_t(other)];
        ranks += its.color == color;
        rank += its.color == color && (its.key < key || (its.key == key && other < it->rank));
    }
    *out = nullptr;
    std::string folder = it->folder + "-" + std::to_string(it->splits++) + "-" + std::to_string(color);
    return color < 0 ? 0 : begin(out, folder, ranks, rank);
}
int ncclCommDestroy(Communicator* it) {
    std::error_code ignored;  // it is not empty yet, or another rank removed it
    std::filesystem::remove(it->folder, ignored);
    delete it;
    return 0;
}
// A sum is not computed: every rank is told its own part of it.
int ncclAllReduce(const void* from, void* to, size_t count, int type, int, void*, void*) {
    if (from != to && count * kElement[type] <= kLongestMessage) {
        std::memcpy(to, from, count * kElement[type]);
        set_values(to, count * kElement[type], has_values(from, count * kElement[type]));
    }
    return 0;
}
}
