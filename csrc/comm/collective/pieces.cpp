// Who sends what to whom: the geometry of each collective as pieces, in elements.
//
// A piece goes from one rank's input to another rank's output. Reducing collectives add the
// pieces that meet at the same place. `mine` is the place in the buffer of the rank that asks,
// `theirs` the place in the other rank's buffer.
#include <algorithm>

#include "comm/base/error.h"
#include "comm/collective/places.h"
#include "comm/operations/collective_operation.h"

namespace dpcore {

uint64_t CollectiveOperation::part(const std::vector<uint64_t>& parts, int r) const {
  return part_of(request_, parts, r);
}

uint64_t CollectiveOperation::part_begin(const std::vector<uint64_t>& parts, int r) const {
  return part_begin_of(request_, parts, r);
}

CollectiveOperation::Piece CollectiveOperation::outgoing(int to) const {
  const auto& parts = request_.input_parts;
  switch (request_.collective) {
    case Collective::all_reduce:
      return {request_.count, 0, 0};
    case Collective::broadcast:
      return me() == request_.root ? Piece{request_.count, 0, 0} : Piece{};
    case Collective::reduce:
      return to == request_.root ? Piece{request_.count, 0, 0} : Piece{};
    case Collective::all_gather:
      return {part(parts, me()), 0, part_begin(parts, me())};
    case Collective::gather:
      return to == request_.root ? Piece{part(parts, me()), 0, part_begin(parts, me())} : Piece{};
    case Collective::scatter:
      return me() == request_.root ? Piece{part(parts, to), part_begin(parts, to), 0} : Piece{};
    case Collective::reduce_scatter:
      return {part(parts, to), part_begin(parts, to), 0};
    case Collective::all_to_all:
      // Where it lands at an uneven peer only the peer knows: such pieces go by the stage.
      return {part(parts, to), part_begin(parts, to), part_begin(request_.output_parts, me())};
    case Collective::barrier:
      break;
  }
  return {};
}

CollectiveOperation::Piece CollectiveOperation::incoming(int from) const {
  const auto& parts = request_.output_parts;
  switch (request_.collective) {
    case Collective::all_reduce:
      return {request_.count, 0, 0};
    case Collective::broadcast:
      return from == request_.root ? Piece{request_.count, 0, 0} : Piece{};
    case Collective::reduce:
      return me() == request_.root ? Piece{request_.count, 0, 0} : Piece{};
    case Collective::all_gather:
      return {part(parts, from), part_begin(parts, from), 0};
    case Collective::gather:
      return me() == request_.root ? Piece{part(parts, from), part_begin(parts, from), 0} : Piece{};
    case Collective::scatter:
      return from == request_.root ? Piece{part(parts, me()), 0, part_begin(parts, me())} : Piece{};
    case Collective::reduce_scatter:
      return {part(parts, me()), 0, part_begin(parts, me())};
    case Collective::all_to_all:
      return {part(parts, from), part_begin(parts, from), part_begin(request_.input_parts, me())};
    case Collective::barrier:
      break;
  }
  return {};
}

bool CollectiveOperation::publishes(int r) const {
  switch (request_.collective) {
    case Collective::broadcast:
    case Collective::scatter:
      return r == request_.root;
    case Collective::reduce:
    case Collective::gather:
      return r != request_.root;
    default:
      return true;
  }
}

bool CollectiveOperation::consumes(int r) const {
  switch (request_.collective) {
    case Collective::broadcast:
    case Collective::scatter:
      return r != request_.root;
    case Collective::reduce:
    case Collective::gather:
      return r == request_.root;
    default:
      return true;
  }
}

bool CollectiveOperation::publishes() const { return publishes(me()); }
bool CollectiveOperation::consumes() const { return consumes(me()); }

bool CollectiveOperation::reduces() const {
  return request_.collective == Collective::all_reduce ||
         request_.collective == Collective::reduce_scatter ||
         request_.collective == Collective::reduce;
}

bool CollectiveOperation::same_piece_for_all() const {
  return request_.collective != Collective::reduce_scatter &&
         request_.collective != Collective::scatter &&
         request_.collective != Collective::all_to_all;
}

// What this rank copies into its stage.
size_t CollectiveOperation::staged_elements() const {
  size_t largest = 0;
  size_t sum = 0;
  for (int r = 0; r < world(); ++r) {
    const size_t elements = publishes() && consumes(r) && r != me() ? outgoing(r).elements : 0;
    largest = std::max(largest, elements);
    sum += elements;
  }
  return same_piece_for_all() ? largest : sum;
}

// What it reads from the stages of the others.
size_t CollectiveOperation::received_elements() const {
  size_t sum = 0;
  for (int r = 0; r < world(); ++r) {
    sum += consumes() && publishes(r) && r != me() ? incoming(r).elements : 0;
  }
  return sum;
}

// The part of the data that does not travel: own input to own output.
void CollectiveOperation::copy_own_piece() {
  const bool has_own =
      request_.collective == Collective::all_gather ||
      request_.collective == Collective::all_to_all ||
      ((request_.collective == Collective::gather || request_.collective == Collective::scatter) &&
       me() == request_.root);
  if (!has_own) {
    return;
  }
  const std::byte* from = request_.input + outgoing(me()).mine * element_;
  std::byte* to = request_.output + incoming(me()).mine * element_;
  if (from != to) {
    const size_t bytes = incoming(me()).elements * element_;
    copy_bytes(to, from, bytes, bytes >= kStreamingBytes);
  }
}

// Uneven all_to_all: the stage begins with what its owner is about to send to each rank.
void CollectiveOperation::check_announced_parts() const {
  for (int r = 0; r < world(); ++r) {
    const auto* announced = reinterpret_cast<const uint64_t*>(stage_of(r));
    if (announced[me()] != incoming(r).elements) {
      throw Mismatch(describe() + ": rank " + std::to_string(r) + " sends " +
                     std::to_string(announced[me()]) + " elements to rank " + std::to_string(me()) +
                     ", which expects " + std::to_string(incoming(r).elements) +
                     "; input splits of one side must be the output splits of the other");
    }
  }
}

}  // namespace dpcore
