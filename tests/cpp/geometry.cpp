// What goes from which rank to which, by which path and through which part of the stage: pure
// functions, so no rank is started. What the giver of a piece says about it must be what its taker
// says, the pieces must make up the result, and what lies in the stage at the same time must not
// overlap.
#include <numeric>
#include <string>
#include <vector>

#include "check.h"
#include "comm/collective/geometry.h"
#include "comm/collective/path.h"

using namespace dpcore;

namespace {

constexpr Collective kAll[] = {Collective::all_reduce, Collective::broadcast,
                               Collective::reduce,     Collective::all_gather,
                               Collective::gather,     Collective::scatter,
                               Collective::all_to_all, Collective::reduce_scatter};
int cases = 0;

// Rank r sends uneven_part(r, to) elements to rank `to`; ranks with none are among them.
uint64_t uneven_part(int r, int to) { return static_cast<uint64_t>((r * 7 + to * 3) % 5); }

// What each rank asks for.
std::vector<Request> requests(Collective collective, int world, int root, bool even) {
  std::vector<Request> all(world);
  for (int r = 0; r < world; ++r) {
    Request& request = all[r];
    request.collective = collective;
    request.dtype = DType::f32;
    request.root = root;
    request.count = 3;
    for (int i = 0; i < world && !even; ++i) {
      const bool exchange = collective == Collective::all_to_all;
      request.input_parts.push_back(exchange ? uneven_part(r, i) : uneven_part(1, i));
      request.output_parts.push_back(exchange ? uneven_part(i, r) : uneven_part(1, i));
    }
  }
  return all;
}

uint64_t size_of_output(const Request& request, Collective collective, int me) {
  switch (collective) {
    case Collective::all_gather:
    case Collective::gather:
    case Collective::all_to_all: {
      const auto& parts = request.output_parts;
      return std::accumulate(parts.begin(), parts.end(), uint64_t{0});
    }
    case Collective::scatter:
    case Collective::reduce_scatter:
      return request.output_parts[me];
    default:
      return request.count;
  }
}

void check_pieces(Collective collective, int world, int root, bool even) {
  std::vector<Request> all = requests(collective, world, root, even);
  size_t given = 0;
  size_t received = 0;
  for (int taker = 0; taker < world; ++taker) {
    Request& request = all[taker];
    std::vector<int> written;
    for (int giver = 0; giver < world; ++giver) {
      const Piece out = outgoing(all[giver], giver, taker);
      const Piece in = incoming(request, taker, giver);
      CHECK(out.elements == in.elements);
      CHECK(in.elements == 0 || even || collective == Collective::all_to_all ||
            in.theirs == out.mine);
      if (even && in.elements > 0) {
        CHECK(in.mine == out.theirs && in.theirs == out.mine);
      }
      const bool travels =
          giver != taker && publishes(all[giver], giver) && consumes(request, taker);
      given += travels ? out.elements : 0;
      const bool arrives = travels || (giver == taker && keeps_a_piece(request, taker));
      if (arrives || (giver == taker && reduces(collective) && consumes(request, taker))) {
        written.resize(std::max(written.size(), in.mine + in.elements));
        for (size_t i = in.mine; i < in.mine + in.elements; ++i) {
          ++written[i];
        }
      }
    }
    received += received_elements(request, taker, world);
    if (!consumes(request, taker)) {
      continue;  // a root that only gives to itself
    }
    if (even) {
      request.output_parts.assign(world, request.count);
    }
    CHECK(written.size() <= size_of_output(request, collective, taker));
    written.resize(size_of_output(request, collective, taker));
    for (const int times : written) {
      CHECK(times == (reduces(collective) ? world : 1));
    }
  }
  CHECK(given == received);
  ++cases;
}

// What is in the stage at the same time: all pieces of as many chunks as there are buffers.
void check_stage(const StageLayout& layout, size_t quota) {
  CHECK(quota > 0);
  std::vector<size_t> begins;
  for (size_t chunk = 5; chunk < 5 + kStageBuffers; ++chunk) {
    for (size_t piece = 0; piece < layout.pieces; ++piece) {
      begins.push_back(layout.offset(chunk, piece, quota));
      CHECK(begins.back() % 64 == 0);
      CHECK(begins.back() >= (layout.announces_parts ? layout.pieces * sizeof(uint64_t) : 0));
      CHECK(begins.back() + quota * layout.element <= kStageBytes);
    }
  }
  std::sort(begins.begin(), begins.end());
  for (size_t i = 1; i < begins.size(); ++i) {
    CHECK(begins[i] - begins[i - 1] >= quota * layout.element);
  }
  ++cases;
}

void check_chunks(size_t elements, size_t quota) {
  const size_t chunks = chunks_of(elements, quota);
  size_t sum = 0;
  for (size_t chunk = 0; chunk < chunks; ++chunk) {
    CHECK(in_chunk(elements, chunk, quota) > 0);
    sum += in_chunk(elements, chunk, quota);
  }
  CHECK(sum == elements && in_chunk(elements, chunks, quota) == 0);
  ++cases;
}

// Giver and taker together copy every byte once.
void check_shares(Path path, int world, int root, bool root_gives, size_t bytes) {
  Request request;
  request.root = root;
  for (int other = 0; other < world; ++other) {
    if (other == root) {
      continue;
    }
    const int giver = root_gives ? root : other;
    const int taker = root_gives ? other : root;
    const ByteRange given = own_share(request, path, giver, world, bytes, true);
    const ByteRange taken = own_share(request, path, taker, world, bytes, false);
    CHECK(given.end - given.begin + taken.end - taken.begin == bytes);
    CHECK(given.end <= taken.begin || taken.end <= given.begin);
    ++cases;
  }
}

Path path_of(Collective collective, size_t bytes, const Reach& reach,
             Path force = Path::automatic) {
  Request request;
  request.collective = collective;
  request.count = bytes;
  request.force = force;
  return choose_path(request, 4, reach);
}

void check_paths() {
  constexpr size_t kMany = size_t{1} << 20;
  const Reach nothing{false, false, false};
  const Reach everything{true, true, true};
  const Reach inputs{true, false, true};
  const Reach outputs{false, true, true};
  const Reach readable{false, false, true};
  for (const Collective collective : kAll) {
    CHECK(path_of(collective, kMany, everything, Path::stage) == Path::stage);
    if (collective == Collective::all_reduce) {
      continue;
    }
    CHECK(path_of(collective, kMany, nothing) == Path::stage);
    CHECK(path_of(collective, kMany, inputs) == Path::pull);
    CHECK(path_of(collective, kMany, readable) == Path::read);
    CHECK(path_of(collective, kMany, outputs) == (reduces(collective) ? Path::read : Path::push));
    const bool shares = has_root(collective) && !reduces(collective);
    CHECK(path_of(collective, kMany, everything) == (shares ? Path::shared : Path::pull));
    CHECK(path_of(collective, 1000, everything) == Path::pull);
  }
  for (const Reach& reach : {nothing, inputs, outputs, readable}) {
    CHECK(path_of(Collective::all_reduce, kMany, reach) == Path::two_shot_stage);
  }
  CHECK(path_of(Collective::all_reduce, kMany, everything) == Path::two_shot_push);
  Request request;
  request.collective = Collective::all_to_all;
  CHECK(choose_path(request, 1, everything) == Path::alone);
  request.input_parts = {1, 2};
  CHECK(choose_path(request, 2, everything) == Path::stage);
  request.program = std::make_shared<Program>();
  CHECK(choose_path(request, 2, everything) == Path::moves);
  request.collective = Collective::barrier;
  CHECK(choose_path(request, 2, everything) == Path::barrier);
}

void check_sizes() {
  Request request;
  request.dtype = DType::f32;
  request.count = kSmallBytes / 4;
  request.collective = Collective::all_reduce;
  CHECK(bytes_of(request, 4) == kSmallBytes && is_small(request, 4, kSmallBytes));
  request.count = kSmallBytesOfFrames / 4;
  CHECK(is_small(request, 2, kSmallBytesOfFrames) && !is_small(request, 2, kSmallBytes));
  request.count = kSmallBytes / 4;
  request.collective = Collective::all_gather;
  CHECK(bytes_of(request, 4) == 4 * kSmallBytes && !is_small(request, 4, kSmallBytes));
  request.count = 1;
  CHECK(is_small(request, 4, kSmallBytes));
  request.force = Path::two_shot_push;
  CHECK(!is_small(request, 4, kSmallBytes));
}

}  // namespace

int main() {
  for (const int world : {1, 2, 3, 5, 8}) {
    for (const Collective collective : kAll) {
      for (int root = 0; root < (has_root(collective) ? world : 1); ++root) {
        check_pieces(collective, world, root, true);
        if (bytes_of(requests(collective, world, root, true)[0], 1) !=
            bytes_of(requests(collective, world, root, true)[0], 2)) {  // a part per rank
          check_pieces(collective, world, root, false);
        }
      }
    }
    for (int root = 0; root < world; ++root) {
      for (const Path path : {Path::pull, Path::push, Path::shared}) {
        check_shares(path, world, root, true, 1000);
        check_shares(path, world, root, false, 100'000);
      }
    }
  }
  for (const size_t element : {1, 2, 4, 8}) {
    for (size_t bytes = 16384; bytes <= size_t{1} << 28; bytes *= 4) {
      for (const size_t world : {1, 2, 7, 64, 512}) {
        for (const StageLayout& layout :
             {StageLayout{element, bytes, 1, false}, StageLayout{element, bytes, world, false},
              StageLayout{element, bytes, world, true}}) {
          check_stage(layout, layout.quota());
          check_stage(layout, 5);  // as a small operation is one chunk
        }
      }
      const size_t quota = two_shot_quota(bytes, element);
      CHECK(quota * element <= kStageBytes / kStageBuffers);
      CHECK(two_shot_offset(kStageBuffers - 1) + quota * element <= kStageBytes);
      check_chunks(bytes / element, quota);
      check_chunks(bytes / element + 1, StageLayout{element, bytes, 3, false}.quota());
    }
  }
  check_paths();
  check_sizes();
  std::printf("%d cases: fine\n", cases);
}
