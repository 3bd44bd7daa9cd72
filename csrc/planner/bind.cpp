// The planner's native search as a Python module; src/gradsync/planner/joint.py is the interface and checks what it is
// given. The GIL is free while it runs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "search.hpp"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace search {
namespace {

using Knots = std::vector<double>;
using DemandTuple = std::tuple<int, int, Knots, Knots>;
using PartTuple = std::tuple<int, int, int>;

Problem problem_of(const std::vector<double> &gaps, double rest, const std::vector<std::vector<double>> &amounts,
                   const std::vector<std::vector<DemandTuple>> &options, const std::vector<std::vector<uint8_t>> &allowed,
                   const std::vector<uint8_t> &alone) {
    std::vector<Option> made(options.size());
    for (size_t o = 0; o < options.size(); ++o)
        for (const auto &[resource, row, knots, seconds] : options[o])
            made[o].chain.push_back({resource, row, {knots, seconds}});
    return Problem(gaps, rest, amounts, std::move(made), allowed, alone);
}

std::vector<Part> parts_of(const std::vector<PartTuple> &tuples) {
    std::vector<Part> parts;
    for (const auto &[start, stop, option] : tuples) parts.push_back({start, stop, option});
    return parts;
}

std::pair<std::vector<PartTuple>, double> tuples_of(const Solution &solution) {
    std::vector<PartTuple> parts;
    for (const Part &part : solution.parts) parts.emplace_back(part.start, part.stop, part.option);
    return {parts, solution.seconds};
}

std::pair<std::vector<PartTuple>, double> find_in(const Problem &problem, int max_items, int positions, double transitions,
                                                  size_t demands) {
    Solution solution;
    {
        nb::gil_scoped_release unlocked;
        solution = find(problem, {max_items, positions, transitions, demands});
    }
    return tuples_of(solution);
}

}  // namespace
}  // namespace search

NB_MODULE(_search, m) {
    using namespace search;
    m.doc() = "The native search for plans; gradsync.planner.joint is the interface.";
    nb::class_<Problem>(m, "Problem")
        .def("__init__",
             [](Problem *self, const std::vector<double> &gaps, double rest,
                const std::vector<std::vector<double>> &amounts, const std::vector<std::vector<DemandTuple>> &options,
                const std::vector<std::vector<uint8_t>> &allowed,
                const std::vector<uint8_t> &alone) { new (self) Problem(problem_of(gaps, rest, amounts, options, allowed, alone)); });
    m.def("find", &find_in);
    m.def("lower_bound", &lower_bound, nb::call_guard<nb::gil_scoped_release>());
    m.def("exhaust", [](const Problem &problem, int max_items) { return tuples_of(exhaust(problem, max_items)); });
    m.def("play", [](const Problem &problem, const std::vector<PartTuple> &parts) {
        return Machine(problem).play(parts_of(parts));
    });
}
