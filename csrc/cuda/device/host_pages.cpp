// See host_pages.h.
#include "cuda/device/host_pages.h"

#include <map>
#include <mutex>

namespace dpcore {
namespace {

struct Pages {
  size_t bytes = 0;
  int users = 0;
};

struct Table {
  std::mutex mutex;
  std::map<const std::byte*, Pages> pages;
};

// Never destroyed: code that holds pages until the process ends still finds it.
Table& table() {
  static auto* it = new Table;
  return *it;
}

}  // namespace

std::shared_ptr<void> share_host_pages(void* pages, size_t bytes,
                                       const std::function<void()>& begin,
                                       std::function<void()> end) {
  const auto* key = static_cast<const std::byte*>(pages);
  {
    const std::lock_guard<std::mutex> lock(table().mutex);
    const auto found = table().pages.find(key);
    if (found == table().pages.end()) {
      begin();
      table().pages[key] = {bytes, 1};
    } else {
      ++found->second.users;
    }
  }
  return {pages, [key, end = std::move(end)](void*) {
            const std::lock_guard<std::mutex> lock(table().mutex);
            const auto found = table().pages.find(key);
            if (--found->second.users > 0) {
              return;
            }
            table().pages.erase(found);
            end();
          }};
}

bool are_host_pages_shared(const void* address) {
  const std::lock_guard<std::mutex> lock(table().mutex);
  const auto* at = static_cast<const std::byte*>(address);
  auto next = table().pages.upper_bound(at);
  if (next == table().pages.begin()) {
    return false;
  }
  --next;
  return at < next->first + next->second.bytes;
}

}  // namespace dpcore
