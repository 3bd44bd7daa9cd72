// Drives the native search over random problems, for the address and undefined behaviour sanitizers to watch. Built and
// run by test_search.py.
#include <cstdio>
#include <cstdlib>
#include <random>

#include "search.hpp"

using namespace search;

static std::mt19937 random_bits(0);

static int draw(int count) { return static_cast<int>(random_bits() % count); }

static Problem some_problem(int size, int options) {
    std::vector<double> gaps(size);
    std::vector<std::vector<double>> amounts(2, std::vector<double>(size));
    for (double &gap : gaps) gap = draw(4);
    for (std::vector<double> &row : amounts)
        for (double &amount : row) amount = draw(5);
    std::vector<Option> made(options);
    std::vector<std::vector<uint8_t>> allowed(options, std::vector<uint8_t>(size, 1));
    for (Option &option : made)
        for (int i = draw(7); i > 0; --i) {
            const double call = draw(3), slope = draw(3);
            const Curve line({0, 1}, {call, call + slope}), knee({0, 2, 3}, {call, call, call + slope});
            option.chain.push_back({draw(kResources), draw(2), draw(2) ? line : knee});
        }
    for (int o = 1; o < options; ++o)  // each item may take the first
        for (uint8_t &may : allowed[o]) may = draw(4) > 0;
    std::vector<uint8_t> alone(size);
    for (uint8_t &mark : alone) mark = draw(5) == 0;
    return Problem(gaps, draw(3), amounts, made, allowed, alone);
}

#define CHECK(condition)                                                      \
    do {                                                                      \
        if (!(condition)) {                                                   \
            std::printf("line %d: %s does not hold\n", __LINE__, #condition); \
            std::exit(1);                                                     \
        }                                                                     \
    } while (0)

int main() {
    for (int round = 0; round < 60; ++round)
        for (int size : {0, 1, 2, 4, 30}) {
            const Problem problem = some_problem(size, 1 + draw(4));
            const int max_items = draw(3) ? std::max(size, 1) : 1 + draw(3);
            const Solution found = find(problem, {max_items, 4 + draw(20), 500, 2000});
            CHECK(Machine(problem).play(found.parts) == found.seconds);
            const double bound = lower_bound(problem, found.seconds, max_items, 1 + draw(8));
            CHECK(bound <= found.seconds);
            if (size > 4) continue;
            const double best = exhaust(problem, max_items).seconds;
            CHECK(best <= found.seconds * (1 + 1e-9));
            CHECK(bound <= best * (1 + 1e-9));
        }
    return 0;
}
