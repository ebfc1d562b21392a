// Pages of the host that devices of this process use, counted.
//
// A driver registers pages for the whole process, once. Ranks that are threads share their pages of
// flags, so the first one to come registers them and the last one to go ends it: a rank that leaves
// must not take the pages from under the streams of another one.
//
// Threads: any; the functions are called one at a time.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace dpcore {

// `begin` is called where these pages are not registered in this process, `end` when the last
// result is dropped. What begin() throws is passed on, and nothing is counted.
std::shared_ptr<void> share_host_pages(void* pages, size_t bytes,
                                       const std::function<void()>& begin,
                                       std::function<void()> end);

// Whether the address lies in such pages now.
bool are_host_pages_shared(const void* address);

}  // namespace dpcore
