// See nccl_library.h.
#include "cuda/nccl/nccl_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <mutex>
#include <optional>

#include "comm/base/error.h"

namespace dpcore::nccl {
namespace {

constexpr const char* kName = "libnccl.so.2";
constexpr const char* kOverride = "DPCORE_NCCL_LIBRARY";
constexpr int kOldest = 21400;

struct Candidate {
  std::string path;
  std::string found_by;
  int flags = RTLD_NOW | RTLD_LOCAL;
};

std::vector<Candidate> candidates(const std::vector<std::string>& wheels) {
  const char* wish = std::getenv(kOverride);
  if (wish != nullptr && *wish != '\0') {
    return {{wish, kOverride}};  // the user's choice has no fallback
  }
  std::vector<Candidate> list{{kName, "already loaded", RTLD_NOW | RTLD_NOLOAD}};
  for (const std::string& wheel : wheels) {
    list.push_back({wheel, "a wheel of NCCL"});
  }
  list.push_back({kName, "the system"});
  return list;
}

// Fills `library`, or says why not.
std::optional<std::string> fill(Library& library, void* handle) {
  std::string missing;
#define DPCORE_NCCL_LOAD(type, name, arguments) \
  library.name = reinterpret_cast<type(*) arguments>(dlsym(handle, "nccl" #name));
#define DPCORE_NCCL_CHECK(type, name, arguments) \
  if (library.name == nullptr)                   \
    missing += (missing.empty() ? "nccl" : ", nccl") + std::string(#name);
  DPCORE_NCCL_NEEDED(DPCORE_NCCL_LOAD)
  DPCORE_NCCL_NEEDED(DPCORE_NCCL_CHECK)
  DPCORE_NCCL_OPTIONAL(DPCORE_NCCL_LOAD)
#undef DPCORE_NCCL_LOAD
#undef DPCORE_NCCL_CHECK
  if (library.GetVersion != nullptr) {
    Dl_info info{};
    if (dladdr(reinterpret_cast<void*>(library.GetVersion), &info) != 0 && info.dli_fname) {
      library.path = info.dli_fname;
    }
    const int result = library.GetVersion(&library.version);
    if (result != kSuccess) {
      return "ncclGetVersion answers " + std::to_string(result);
    }
    if (library.version < kOldest) {
      return "it is NCCL " + version_text(library.version) + ", and " + version_text(kOldest) +
             " or newer is needed";
    }
  }
  if (!missing.empty()) {
    return "it lacks " + missing;
  }
  return std::nullopt;
}

Library load(const std::vector<std::string>& wheels) {
  std::string tried;
  for (const Candidate& candidate : candidates(wheels)) {
    tried += "\n  " + candidate.path + " (" + candidate.found_by + "): ";
    void* handle = dlopen(candidate.path.c_str(), candidate.flags);
    if (handle == nullptr) {
      const char* why = dlerror();
      tried += (candidate.flags & RTLD_NOLOAD) != 0 || why == nullptr ? "no" : why;
      continue;
    }
    Library library;
    library.path = candidate.path;
    library.found_by = candidate.found_by;
    const std::optional<std::string> problem = fill(library, handle);
    if (!problem) {
      return library;
    }
    tried += *problem;
    dlclose(handle);
  }
  throw Unsupported("NCCL was not found:" + tried +
                    "\nInstall the wheel that fits torch's CUDA (nvidia-nccl-cu13 or "
                    "nvidia-nccl-cu12), or set " +
                    kOverride + " to the path of libnccl.so.2");
}

}  // namespace

std::string version_text(int version) {
  if (version < 10000) {
    version = version / 1000 * 10000 + version % 1000;  // 2804 was 2.8.4
  }
  return std::to_string(version / 10000) + "." + std::to_string(version % 10000 / 100) + "." +
         std::to_string(version % 100);
}

std::string Library::describe() const {
  return "NCCL " + version_text(version) + " (" + path + ")";
}

const Library& library(const std::vector<std::string>& wheels) {
  static std::mutex mutex;
  static std::optional<Library> loaded;
  const std::lock_guard<std::mutex> lock(mutex);
  if (!loaded) {
    loaded = load(wheels);
  }
  return *loaded;
}

}  // namespace dpcore::nccl
