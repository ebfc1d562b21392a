// Schedules of launches by name, or written in Python.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "reducer/launch/launch_schedule.h"

namespace dpcore {

// `schedule`: a name, or an object with the methods of dpcore.LaunchSchedule.
std::shared_ptr<LaunchSchedule> launch_schedule_of(const pybind11::object& schedule);

}  // namespace dpcore
