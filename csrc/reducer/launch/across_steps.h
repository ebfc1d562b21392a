// The schedules whose communication goes on under the next forward.
#pragma once

#include <memory>

#include "reducer/launch/launch_schedule.h"

namespace dpcore {

std::shared_ptr<LaunchSchedule> make_priority();
std::shared_ptr<LaunchSchedule> make_dear();
std::shared_ptr<LaunchSchedule> make_zero1();
std::shared_ptr<LaunchSchedule> make_zero2();

}  // namespace dpcore
