// The planner's problem as the native search takes it, and the machine that says how long a plan takes: the same rules
// as src/gradsync/planner/solver/problem.py states.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace search {

constexpr int kResources = 4;  // COMPUTE, OFFLOAD, INTRA, INTER
constexpr double kNever = std::numeric_limits<double>::infinity();

// Seconds by amount: linear between knots, beyond the last knot as between the last two.
class Curve {
   public:
    Curve(std::vector<double> amounts, std::vector<double> seconds);
    double operator()(double amount) const;
    bool below(const Curve &other) const;  // or equal, for every amount

   private:
    std::vector<double> amounts_, seconds_, slopes_;
};

struct Demand {
    int resource;
    int amounts;  // which of Problem::amounts
    Curve curve;
};

struct Option {
    std::vector<Demand> chain;
    std::vector<int> turn;  // by place in the chain: it is the n-th of its demands on its resource
    size_t lead = 0;        // demands on COMPUTE that the chain begins with
};

struct Part {
    int start, stop, option;
    bool operator==(const Part &other) const {
        return start == other.start && stop == other.stop && option == other.option;
    }
};

struct Problem {
    int size = 0;
    double rest = 0.0;
    std::vector<double> ready;                 // backward's time until item i-1 is ready, without any demand
    std::vector<int> instants;                 // items up to item i-1 in a row that take backward no time
    std::vector<std::vector<double>> amounts;  // sums of the items before i
    std::vector<Option> options;
    std::vector<std::vector<int>> refused;  // by option: items before i that may not take it
    std::vector<int> alone;                 // items before i that must be alone
    size_t longest = 0;                     // demands of the longest chain
    int turns[kResources] = {};             // the most demands that a chain has on the resource
    std::vector<int> place[kResources];     // by option and turn: where in the chain; -1: it has fewer

    Problem(const std::vector<double> &gaps, double rest, const std::vector<std::vector<double>> &amounts,
            std::vector<Option> options, const std::vector<std::vector<uint8_t>> &allowed,
            const std::vector<uint8_t> &alone);

    bool may(int start, int stop, int option) const {
        return refused[option][stop] == refused[option][start] && may_join(start, stop);
    }
    bool may_join(int start, int stop) const { return stop - start == 1 || alone[stop] == alone[start]; }
    // What each demand of the option takes.
    void price(int option, int start, int stop, double *seconds) const;
    // Whether option `a`, with these seconds, is before `b` in everything: demand for demand, some of which it has not.
    bool beats(int a, const double *seconds_a, int b, const double *seconds_b) const;
    // Whether all items that may take `b` may take `a`.
    bool as_free(int a, int b) const;
    // The options but for those that one other is before in everything, whatever the part.
    std::vector<int> undominated() const;

   private:
    template <typename LessOrEqual>
    bool embeds(int a, int b, LessOrEqual less_or_equal) const;
};

struct Waiting {
    double since;
    int part, place;  // in the chain of the part's option
};

// Plays plans; its buffers are kept between calls.
class Machine {
   public:
    explicit Machine(const Problem &problem) : problem_(problem) {}
    // From backward's begin to the last demand; kNever as soon as it is certain to be `limit` or more.
    double play(const std::vector<Part> &parts, double limit = kNever);

    size_t demands = 0;  // served in all plays: what they cost

   private:
    void arrive(const std::vector<Part> &parts, double now, int part, int place);
    const Waiting *first(const std::vector<Part> &parts, int resource);
    void leave(const std::vector<Part> &parts, int resource, const Waiting &served);

    const Problem &problem_;
    std::vector<double> seconds_;        // by part and place in its chain
    std::vector<double> arrived_;        // likewise; kNever: not yet
    std::vector<Waiting> compute_;       // what waits for COMPUTE
    std::vector<int> head_[kResources];  // by turn: the part that is next
    bool known_[kResources] = {};        // whether `first_` still holds
    Waiting first_[kResources] = {};     // part -1: nothing may be served
};

}  // namespace search
