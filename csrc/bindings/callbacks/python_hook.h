// Communication hooks written in Python, which run instead of a bucket's all-reduce.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "reducer/bucket/bucket_hook.h"

namespace dpcore {

// `runner`: start(bucket), wait(bucket), abandon(bucket); see dpcore/ddp/torch_face/comm_hooks.py.
std::unique_ptr<BucketHook> python_hook(pybind11::object runner);

}  // namespace dpcore
