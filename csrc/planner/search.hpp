// Plans for a problem, and a bound below the seconds of all of them. What they do is told where Python calls them, in
// src/gradsync/planner/solver/joint.py.
#pragma once

#include <array>
#include <vector>

#include "machine.hpp"

namespace search {

using Load = std::array<double, kResources>;

// Weighs the resources' loads against each other; the weights of a row are 1 together.
std::vector<Load> weights_of(const Problem &problem);

struct Settings {
    int max_items;       // of a part
    int positions;       // at which the program may cut
    double transitions;  // of labels that it may make
    size_t demands;      // that all plays together may serve
};

struct Solution {
    std::vector<Part> parts;
    double seconds = kNever;
};

// No parts where the constraints leave no plan.
Solution find(const Problem &problem, const Settings &settings);

// The best of all plans, each played: for problems of a few items.
Solution exhaust(const Problem &problem, int max_items);

// No plan with parts of at most `max_items` takes less; `upper` is what one takes. Keeps `labels` at every item.
double lower_bound(const Problem &problem, double upper, int max_items, size_t labels);

}  // namespace search
