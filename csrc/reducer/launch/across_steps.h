// The schedules whose communication goes on under the next forward.
#pragma once

#include <memory>
#include <string>

#include "reducer/launch/launch_schedule.h"

namespace dpcore {

// "priority", "dear", "zero1"; null for other names.
std::shared_ptr<LaunchSchedule> make_schedule_across_steps(const std::string& name);

}  // namespace dpcore
