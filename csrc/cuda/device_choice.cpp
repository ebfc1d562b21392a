// See device_choice.h.
#include "cuda/device_choice.h"

#include <cstring>

#include "comm/base/error.h"
#include "cuda/mapped/mapped_communicator.h"
#include "cuda/nccl/nccl_communicator.h"

namespace dpcore {
namespace {

constexpr std::string_view kAuto = "auto";
constexpr std::string_view kNccl = "nccl";
constexpr std::string_view kMapped = "cuda";

// What ranks tell each other. Texts end with a zero.
struct RankInfo {
  char uuid[64] = {};
  char wanted[8] = {};
  char trouble[400] = {};  // why this rank has no device
  char no_nccl[400] = {};  // why it has no NCCL
};

template <size_t size>
void write(char (&field)[size], const std::string& text) {
  text.copy(field, size - 1);
}

bool share_a_device(const std::vector<RankInfo>& infos) {
  for (size_t a = 0; a < infos.size(); ++a) {
    for (size_t b = 0; b < a; ++b) {
      if (std::strcmp(infos[a].uuid, infos[b].uuid) == 0) {
        return true;
      }
    }
  }
  return false;
}

// The same on every rank, as is what it throws.
std::string_view chosen_of(const std::vector<RankInfo>& infos) {
  for (size_t r = 0; r < infos.size(); ++r) {
    const std::string who = "rank " + std::to_string(r);
    if (infos[r].trouble[0] != '\0') {
      throw Unsupported(who + ": " + infos[r].trouble);
    }
    if (std::strcmp(infos[r].wanted, infos[0].wanted) != 0) {
      throw Mismatch("rank 0 asks for '" + std::string(infos[0].wanted) + "' on GPUs, " + who +
                     " for '" + infos[r].wanted + "': set the same on all ranks");
    }
  }
  const std::string_view wanted = infos[0].wanted;
  const std::string_view chosen =
      wanted != kAuto ? wanted : (share_a_device(infos) ? kMapped : kNccl);
  for (size_t r = 0; r < infos.size() && chosen == kNccl; ++r) {
    if (infos[r].no_nccl[0] != '\0') {
      throw Unsupported("rank " + std::to_string(r) + ": " + infos[r].no_nccl +
                        "; within a host 'cuda' does without it");
    }
  }
  return chosen == kNccl ? kNccl : kMapped;
}

std::shared_ptr<StreamCommunicator> start(std::shared_ptr<Communicator> control,
                                          const DeviceChoice& choice) {
  if (choice.backend != kAuto && choice.backend != kNccl && choice.backend != kMapped) {
    throw Unsupported("'" + choice.backend +
                      "' does not exist for GPUs; choose from 'auto', "
                      "'nccl' and 'cuda'");
  }
  RankInfo own;
  write(own.wanted, choice.backend);
  std::shared_ptr<Device> device;
  try {
    device = device_named(choice.device_name, choice.uuid);
    write(own.uuid, device->uuid());
  } catch (const Error& problem) {
    write(own.trouble, problem.what());
  }
  if (choice.backend != kMapped) {
    try {
      nccl::library(choice.libraries);
    } catch (const Error& problem) {
      write(own.no_nccl, problem.what());
    }
  }
  if (chosen_of(control->hear_all(own, choice.options.interrupt)) == kNccl) {
    return NcclCommunicator::start(std::move(control), std::move(device), choice.options,
                                   choice.libraries);
  }
  return MappedCommunicator::start(std::move(control), std::move(device), choice.options);
}

}  // namespace

std::shared_ptr<StreamCommunicator> start_on_device(std::shared_ptr<Communicator> control,
                                                    const DeviceChoice& choice) {
  try {
    return start(control, choice);
  } catch (...) {
    control->close();
    throw;
  }
}

}  // namespace dpcore
