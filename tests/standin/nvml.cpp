// A stand-in for libnvidia-ml.so.1 that the real pynvml loads: the functions that rungs calls, over GPUs that a text file describes.
//
// RUNGS_STANDIN_LIBNVML names the file, which is read again on every call; without it there is no driver. A line is a GPU's index, or *
// for the machine, a key and its value (see DEFAULTS). Every setter call, refused ones too, is a line of <file>.calls:
// `pid uuid set_sm|reset_sm|set_mem|reset_mem min max returned`. The lock in force is the last one granted there, whoever set it, so it
// outlives its process as a real one does.
//
// <sm|mem>_lock: ok, refused, unsupported, ignored (taken, and the clock goes where it likes), or the number of the error returned.
// <sm|mem>_drop_after: readings of that clock by one process after which its lock no longer holds.
// permitted: how many setters the driver grants in all before it refuses. init: what nvmlInit returns.
// lost_after: readings of the SM clock by one process after which every function returns `lost`.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

enum Return {
  SUCCESS = 0,
  UNINITIALIZED = 1,
  NOT_SUPPORTED = 3,
  NO_PERMISSION = 4,
  NOT_FOUND = 6,
  INSUFFICIENT_SIZE = 7,
  DRIVER_NOT_LOADED = 9,
  GPU_IS_LOST = 15,
};

static const std::map<std::string, std::string> DEFAULTS = {
    {"init", "0"},           {"driver", "580.82.07"}, {"cuda", "13000"},
    {"gpus", "2"},           {"permitted", "1000000"}, {"name", "NVIDIA H200"},
    {"uuid", "GPU-0"},       {"capability", "9 0"},   {"memory_bytes", "150754820096"},
    {"limit_mw", "700000"},  {"power_mw", "650000"},  {"temp_c", "60"},
    {"persistence", "1"},    {"compute_mode", "0"},   {"ecc_errors", "0"},
    {"reasons", "0"},        {"processes", ""},       {"sm_clocks", "1980 1965 1755 1500 1200 345"},
    {"mem_clocks", "3201 2619"}, {"sm_free", "1755"}, {"mem_free", "2619"},
    {"sm_lock", "ok"},       {"mem_lock", "ok"},      {"sm_drop_after", "-1"},
    {"mem_drop_after", "-1"}, {"lost_after", "-1"},   {"lost", "15"},
};

static std::atomic<long> readings[2][16];  // of the SM and the memory clock under a lock, by GPU
static std::atomic<long> looked[16];       // at the SM clock, locked or not

static std::string file() {
  const char* name = std::getenv("RUNGS_STANDIN_LIBNVML");
  return name ? name : "";
}

static int index_of(void* device) { return static_cast<int>(reinterpret_cast<intptr_t>(device)) - 1; }

static std::string value(const std::string& gpu, const std::string& key) {
  std::ifstream lines(file());
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string whose, what, rest;
    words >> whose >> what >> std::ws;
    std::getline(words, rest);
    if (whose == gpu && what == key) return rest;
  }
  return key == "uuid" ? "GPU-" + gpu : DEFAULTS.at(key);
}

static std::string value(void* device, const std::string& key) { return value(std::to_string(index_of(device)), key); }

static long number(const std::string& text) { return std::strtol(text.c_str(), nullptr, 10); }

static std::vector<unsigned> numbers(const std::string& text) {
  std::istringstream words(text);
  std::vector<unsigned> found;
  for (unsigned n; words >> n;) found.push_back(n);
  return found;
}

// What any function returns before it looks at its own business.
static int answers(void* device) {
  if (!std::ifstream(file())) return UNINITIALIZED;
  if (!device) return SUCCESS;
  long after = number(value(device, "lost_after"));
  return after >= 0 && looked[index_of(device)] > after ? static_cast<int>(number(value(device, "lost"))) : SUCCESS;
}

struct Call {
  std::string pid, uuid, what;
  unsigned low, high;
  int returned;
};

static std::vector<Call> calls() {
  std::ifstream lines(file() + ".calls");
  std::vector<Call> found;
  for (Call call; lines >> call.pid >> call.uuid >> call.what >> call.low >> call.high >> call.returned;)
    found.push_back(call);
  return found;
}

static int setter(void* device, const std::string& what, const std::string& domain, unsigned low, unsigned high) {
  int returned = answers(device);
  if (returned == SUCCESS) {
    long granted = 0;
    for (const Call& call : calls()) granted += call.returned == SUCCESS;
    std::string lock = value(device, domain + "_lock");
    if (lock == "unsupported")
      returned = NOT_SUPPORTED;
    else if (lock == "refused" || granted >= number(value("*", "permitted")))
      returned = NO_PERMISSION;
    else if (lock != "ok" && lock != "ignored")
      returned = static_cast<int>(number(lock));
  }
  std::ostringstream line;
  line << getpid() << ' ' << value(device, "uuid") << ' ' << what << '_' << domain << ' ' << low << ' ' << high << ' ' << returned
       << '\n';
  int log = open((file() + ".calls").c_str(), O_WRONLY | O_APPEND | O_CREAT, 0644);
  if (log < 0 || write(log, line.str().data(), line.str().size()) < 0) std::abort();
  close(log);
  return returned;
}

static unsigned clock_of(void* device, bool memory) {
  const std::string domain = memory ? "mem" : "sm", uuid = value(device, "uuid");
  const unsigned free = static_cast<unsigned>(number(value(device, domain + "_free")));
  unsigned locked = 0;
  for (const Call& call : calls())
    if (call.uuid == uuid && call.returned == SUCCESS) {
      if (call.what == "set_" + domain) locked = std::min(std::max(free, call.low), call.high);
      if (call.what == "reset_" + domain) locked = 0;
    }
  if (!locked || value(device, domain + "_lock") == "ignored") return free;
  long after = number(value(device, domain + "_drop_after"));
  return after >= 0 && ++readings[memory][index_of(device)] > after ? free : locked;
}

static int text(char* to, unsigned size, const std::string& from) {
  if (from.size() >= size) return INSUFFICIENT_SIZE;
  std::strcpy(to, from.c_str());
  return SUCCESS;
}

static int list(const std::vector<unsigned>& from, unsigned* count, unsigned* to) {
  unsigned room = *count;
  *count = static_cast<unsigned>(from.size());
  if (from.empty()) return SUCCESS;
  if (!to || room < from.size()) return INSUFFICIENT_SIZE;
  std::copy(from.begin(), from.end(), to);
  return SUCCESS;
}

extern "C" {

int nvmlInitWithFlags(unsigned) {
  return answers(nullptr) == SUCCESS ? static_cast<int>(number(value("*", "init"))) : DRIVER_NOT_LOADED;
}
int nvmlShutdown() { return SUCCESS; }
const char* nvmlErrorString(int returned) {
  switch (returned) {
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
  }
}
int nvmlSystemGetDriverVersion(char* to, unsigned size) { return text(to, size, value("*", "driver")); }
int nvmlSystemGetCudaDriverVersion_v2(int* to) { return *to = static_cast<int>(number(value("*", "cuda"))), SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned* to) { return *to = static_cast<unsigned>(number(value("*", "gpus"))), answers(nullptr); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** to) {
  *to = reinterpret_cast<void*>(static_cast<intptr_t>(index) + 1);
  return answers(*to);
}
int nvmlDeviceGetHandleByUUID(const char* uuid, void** to) {
  for (long i = 0; i < number(value("*", "gpus")); ++i)
    if (value(std::to_string(i), "uuid") == uuid) return nvmlDeviceGetHandleByIndex_v2(static_cast<unsigned>(i), to);
  return answers(nullptr) == SUCCESS ? NOT_FOUND : answers(nullptr);
}
int nvmlDeviceGetName(void* d, char* to, unsigned size) { return answers(d) ? answers(d) : text(to, size, value(d, "name")); }
int nvmlDeviceGetUUID(void* d, char* to, unsigned size) { return answers(d) ? answers(d) : text(to, size, value(d, "uuid")); }
int nvmlDeviceGetCudaComputeCapability(void* d, int* major, int* minor) {
  std::vector<unsigned> found = numbers(value(d, "capability"));
  *major = static_cast<int>(found[0]), *minor = static_cast<int>(found[1]);
  return answers(d);
}
int nvmlDeviceGetMemoryInfo(void* d, unsigned long long* to) {  // total, free, used
  to[0] = to[1] = std::strtoull(value(d, "memory_bytes").c_str(), nullptr, 10), to[2] = 0;
  return answers(d);
}

#define NUMBER(function, type, key) \
  int function(void* d, type* to) { return *to = static_cast<type>(number(value(d, key))), answers(d); }
NUMBER(nvmlDeviceGetPowerManagementLimit, unsigned, "limit_mw")
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, "limit_mw")
NUMBER(nvmlDeviceGetPowerUsage, unsigned, "power_mw")
NUMBER(nvmlDeviceGetPersistenceMode, unsigned, "persistence")
NUMBER(nvmlDeviceGetComputeMode, unsigned, "compute_mode")
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, "reasons")
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, "reasons")

int nvmlDeviceGetTemperature(void* d, int, unsigned* to) { return *to = static_cast<unsigned>(number(value(d, "temp_c"))), answers(d); }
int nvmlDeviceGetTotalEccErrors(void* d, int, int, unsigned long long* to) {
  return *to = static_cast<unsigned long long>(number(value(d, "ecc_errors"))), answers(d);
}
int nvmlDeviceGetMigMode(void*, unsigned*, unsigned*) { return NOT_SUPPORTED; }

struct Process {
  unsigned pid;
  unsigned long long used;
  unsigned gpu_instance, compute_instance;
};
int nvmlDeviceGetComputeRunningProcesses_v3(void* d, unsigned* count, Process* to) {
  if (int returned = answers(d)) return returned;
  std::vector<unsigned> pids = numbers(value(d, "processes"));
  pids.push_back(static_cast<unsigned>(getpid()));
  unsigned room = *count;
  *count = static_cast<unsigned>(pids.size());
  if (!to || room < pids.size()) return INSUFFICIENT_SIZE;
  for (size_t i = 0; i < pids.size(); ++i) to[i] = {pids[i], 1 << 20, UINT_MAX, UINT_MAX};
  return SUCCESS;
}

int nvmlDeviceGetSupportedMemoryClocks(void* d, unsigned* count, unsigned* to) {
  return answers(d) ? answers(d) : list(numbers(value(d, "mem_clocks")), count, to);
}
int nvmlDeviceGetSupportedGraphicsClocks(void* d, unsigned memory, unsigned* count, unsigned* to) {
  std::vector<unsigned> highest = numbers(value(d, "mem_clocks"));
  bool listed = !highest.empty() && memory == *std::max_element(highest.begin(), highest.end());
  return answers(d) ? answers(d) : list(listed ? numbers(value(d, "sm_clocks")) : std::vector<unsigned>{}, count, to);
}
int nvmlDeviceGetApplicationsClock(void* d, int kind, unsigned* to) {
  return *to = numbers(value(d, kind == 2 ? "mem_clocks" : "sm_clocks")).at(0), answers(d);
}
int nvmlDeviceGetClockInfo(void* d, int kind, unsigned* to) {
  looked[index_of(d)] += kind != 2;
  if (int returned = answers(d)) return returned;
  return *to = clock_of(d, kind == 2), SUCCESS;
}

int nvmlDeviceSetGpuLockedClocks(void* d, unsigned low, unsigned high) { return setter(d, "set", "sm", low, high); }
int nvmlDeviceResetGpuLockedClocks(void* d) { return setter(d, "reset", "sm", 0, 0); }
int nvmlDeviceSetMemoryLockedClocks(void* d, unsigned low, unsigned high) { return setter(d, "set", "mem", low, high); }
int nvmlDeviceResetMemoryLockedClocks(void* d) { return setter(d, "reset", "mem", 0, 0); }

}  // extern "C"
