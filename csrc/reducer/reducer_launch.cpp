// The way of a bucket: a schedule asks for it, it is sent in the order that all ranks have, somebody
// waits for it, and its gradients are handed out.
#include <algorithm>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "reducer/reducer.h"

namespace dpcore {

void Reducer::launch(size_t b, Launch how) {
  Bucket& bucket = buckets_.at(b);
  if (bucket.missing > 0) {
    throw Error("schedule '" + schedule_->name() + "': launch of " +
                describe(b, bucket, gradients_) + ", of which " + std::to_string(bucket.missing) +
                " gradients are missing; launch it after bucket_ready, or ask is_complete()");
  }
  if (!requested_[b] && !bucket.skipped) {
    requested_[b] = how;
    launch_in_order();
  }
}

void Reducer::launch_in_order() {
  while (next_launch_ < order_.size()) {
    const size_t b = order_[next_launch_];
    Bucket& bucket = buckets_[b];
    if (!bucket.skipped) {
      if (!requested_[b]) {
        return;
      }
      BucketCall call;
      call.layout = bucket.layout;
      call.priority = requested_[b]->priority;
      call.background = requested_[b]->background;
      bucket.launched_ns = now_ns();
      note_moment("bucket launch", EventKind::launch, b, bucket.bytes, bucket.launched_ns);
      bucket.state = Bucket::launched;
      bucket.profiled = profiled_bucket();
      try {
        come_to_this_stream(bucket);
        fill_narrow(bucket);
        if (hook_) {
          hook_->start(b, bucket.flat, call);
        } else {
          communicator_->start(b, bucket.travelling(), call);
        }
      } catch (...) {
        raise_with_bucket(b);
      }
    }
    ++next_launch_;
  }
}

void Reducer::skip(size_t b) {
  if (schedule_->is_exact()) {
    throw Error("schedule '" + schedule_->name() + "': skip of " +
                describe(b, buckets_.at(b), gradients_) +
                ", whose gradients then stay each rank's own, though its is_exact() says that "
                "gradients are averaged; launch the bucket, or return False from is_exact()");
  }
  leave_out(b);
}

void Reducer::leave_out(size_t b) {
  Bucket& bucket = buckets_.at(b);
  if (bucket.state != Bucket::filling || requested_[b]) {
    return;
  }
  bucket.skipped = true;
  bucket.launched_ns = now_ns();
  finish_bucket(bucket);
  launch_in_order();
}

void Reducer::wait(size_t b) {
  Bucket& bucket = buckets_.at(b);
  if (bucket.state == Bucket::complete) {
    return;
  }
  if (bucket.state == Bucket::filling) {
    throw Error("schedule '" + schedule_->name() + "': wait for " +
                describe(b, bucket, gradients_) +
                ", which is not launched, or comes after one in order() that is not");
  }
  try {
    if (hook_) {
      hook_->wait(b, bucket.flat);
    } else {
      communicator_->wait(b);
    }
  } catch (...) {
    raise_with_bucket(b);
  }
  finish_bucket(bucket);
  if (!open_ && unfinished_ == 0) {
    finish_iteration();
  }
}

void Reducer::wait_for_all() {
  for (const size_t b : order_) {
    wait(b);
  }
}

void Reducer::finish_bucket(Bucket& bucket) {
  bucket.state = Bucket::complete;
  bucket.profiled.reset();
  bucket.complete_ns = now_ns();
  --unfinished_;
  if (bucket.skipped) {
    return;
  }
  hand_out(bucket);
}

// For torch's profiler, which costs one look when it is off.
std::unique_ptr<at::RecordFunction> Reducer::profiled_bucket() const {
  if (settings_.profiled_as.empty()) {
    return nullptr;
  }
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  if (!callbacks) {
    return nullptr;
  }
  auto record = std::make_unique<at::RecordFunction>(std::move(*callbacks));
  record->_setAsync();
  record->before(settings_.profiled_as);
  return record;
}

}  // namespace dpcore
