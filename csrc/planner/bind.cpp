// The planner's native search as a Python module; src/gradsync/planner/solver/joint.py is the interface and checks what it is
// given. The GIL is free while it runs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "search.hpp"

namespace nb = nanobind;

namespace search {
namespace {

using Knots = std::vector<double>;
using DemandTuple = std::tuple<int, int, Knots, Knots>;
using PartTuple = std::tuple<int, int, int>;

using Rows = std::vector<std::vector<double>>;
using Marks = std::vector<uint8_t>;

void make_problem(Problem *self, const std::vector<double> &gaps, double rest, const Rows &amounts,
                  const std::vector<std::vector<DemandTuple>> &options, const std::vector<Marks> &allowed,
                  const Marks &alone) {
    std::vector<Option> made(options.size());
    for (size_t o = 0; o < options.size(); ++o)
        for (const auto &[resource, row, knots, seconds] : options[o])
            made[o].chain.push_back({resource, row, {knots, seconds}});
    new (self) Problem(gaps, rest, amounts, std::move(made), allowed, alone);
}

std::vector<Part> parts_of(const std::vector<PartTuple> &tuples) {
    std::vector<Part> parts;
    for (const auto &[start, stop, option] : tuples) parts.push_back({start, stop, option});
    return parts;
}

using Found = std::pair<std::vector<PartTuple>, double>;

Found tuples_of(const Solution &solution) {
    std::vector<PartTuple> parts;
    for (const Part &part : solution.parts) parts.emplace_back(part.start, part.stop, part.option);
    return {parts, solution.seconds};
}

Found find_in(const Problem &problem, int max_items, int positions, double transitions, size_t demands) {
    return tuples_of(find(problem, {max_items, positions, transitions, demands}));
}

Found exhaust_in(const Problem &problem, int max_items) { return tuples_of(exhaust(problem, max_items)); }

double play_in(const Problem &problem, const std::vector<PartTuple> &parts) {
    return Machine(problem).play(parts_of(parts));
}

}  // namespace
}  // namespace search

NB_MODULE(_search, m) {
    using namespace search;
    m.doc() = "The native search for plans; gradsync.planner.solver.joint is the interface.";
    using Unlocked = nb::call_guard<nb::gil_scoped_release>;
    nb::class_<Problem>(m, "Problem").def("__init__", &make_problem);
    m.def("find", &find_in, Unlocked());
    m.def("exhaust", &exhaust_in, Unlocked());
    m.def("lower_bound", &lower_bound, Unlocked());
    m.def("play", &play_in, Unlocked());
}
