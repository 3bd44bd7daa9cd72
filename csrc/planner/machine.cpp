#include "machine.hpp"

#include <algorithm>

namespace search {

Curve::Curve(std::vector<double> amounts, std::vector<double> seconds)
    : amounts_(std::move(amounts)), seconds_(std::move(seconds)) {
    for (size_t i = 0; i + 1 < amounts_.size(); ++i)
        slopes_.push_back((seconds_[i + 1] - seconds_[i]) / (amounts_[i + 1] - amounts_[i]));
}

double Curve::operator()(double amount) const {
    size_t place = 0;
    while (place + 1 < slopes_.size() && amounts_[place + 1] <= amount) ++place;
    return seconds_[place] + (amount - amounts_[place]) * slopes_[place];
}

bool Curve::below(const Curve &other) const {
    if (slopes_.back() > other.slopes_.back()) return false;
    const auto holds = [&](double amount) { return (*this)(amount) <= other(amount); };
    return std::all_of(amounts_.begin(), amounts_.end(), holds) &&
           std::all_of(other.amounts_.begin(), other.amounts_.end(), holds);
}

template <typename T>
static std::vector<double> summed(const std::vector<T> &values) {
    std::vector<double> sums{0.0};
    for (T value : values) sums.push_back(sums.back() + value);
    return sums;
}

static std::vector<int> counted(const std::vector<uint8_t> &marks) {
    std::vector<int> counts{0};
    for (uint8_t mark : marks) counts.push_back(counts.back() + (mark ? 1 : 0));
    return counts;
}

Problem::Problem(const std::vector<double> &gaps, double rest, const std::vector<std::vector<double>> &amounts,
                 std::vector<Option> options, const std::vector<std::vector<uint8_t>> &allowed,
                 const std::vector<uint8_t> &alone)
    : size(static_cast<int>(gaps.size())),
      rest(rest),
      ready(summed(gaps)),
      options(std::move(options)),
      alone(counted(alone)) {
    instants.push_back(0);
    for (double gap : gaps) instants.push_back(gap > 0.0 ? 0 : instants.back() + 1);
    for (const std::vector<double> &values : amounts) this->amounts.push_back(summed(values));
    for (const std::vector<uint8_t> &marks : allowed) {
        std::vector<uint8_t> opposite;
        for (uint8_t mark : marks) opposite.push_back(!mark);
        refused.push_back(counted(opposite));
    }
    for (Option &option : this->options) {
        longest = std::max(longest, option.chain.size());
        for (size_t i = 0; i < option.chain.size(); ++i) {
            const int resource = option.chain[i].resource;
            option.turn.push_back(0);
            for (size_t j = 0; j < i; ++j) option.turn.back() += option.chain[j].resource == resource;
            if (option.lead == i && resource == 0) ++option.lead;
            turns[resource] = std::max(turns[resource], option.turn.back() + 1);
        }
    }
    for (int r = 0; r < kResources; ++r) place[r].assign(this->options.size() * turns[r], -1);
    for (size_t o = 0; o < this->options.size(); ++o)
        for (size_t i = 0; i < this->options[o].chain.size(); ++i) {
            const int r = this->options[o].chain[i].resource;
            place[r][o * turns[r] + this->options[o].turn[i]] = static_cast<int>(i);
        }
}

void Problem::price(int option, int start, int stop, double *seconds) const {
    for (const Demand &demand : options[option].chain) {
        const std::vector<double> &sums = amounts[demand.amounts];
        *seconds++ = demand.curve(sums[stop] - sums[start]);
    }
}

template <typename LessOrEqual>
bool Problem::embeds(int a, int b, LessOrEqual less_or_equal) const {
    const Option &x = options[a], &y = options[b];
    size_t matched = 0;
    for (size_t i = 0; i < y.chain.size() && matched < x.chain.size(); ++i) {
        const int resource = y.chain[i].resource;
        const bool alike = resource ? x.turn[matched] == y.turn[i] : (matched < x.lead) == (i < y.lead);
        if (x.chain[matched].resource == resource && alike && less_or_equal(matched, i)) ++matched;
    }
    return matched == x.chain.size();
}

bool Problem::beats(int a, const double *seconds_a, int b, const double *seconds_b) const {
    return embeds(a, b, [&](size_t i, size_t j) { return seconds_a[i] <= seconds_b[j]; });
}

bool Problem::as_free(int a, int b) const {
    for (int i = 0; i < size; ++i)
        if (refused[a][i + 1] > refused[a][i] && refused[b][i + 1] == refused[b][i]) return false;
    return true;
}

std::vector<int> Problem::undominated() const {
    const int count = static_cast<int>(options.size());
    const auto replaces = [&](int a, int b) {
        return as_free(a, b) && embeds(a, b, [&](size_t i, size_t j) {
                   const Demand &x = options[a].chain[i], &y = options[b].chain[j];
                   return x.amounts == y.amounts && x.curve.below(y.curve);
               });
    };
    std::vector<int> kept;
    for (int o = 0; o < count; ++o) {
        bool replaced = false;
        for (int other = 0; other < count && !replaced; ++other)
            replaced = other != o && replaces(other, o) && (other < o || !replaces(o, other));
        if (!replaced) kept.push_back(o);
    }
    return kept;
}

void Machine::arrive(const std::vector<Part> &parts, double now, int part, int place) {
    const Option &option = problem_.options[parts[part].option];
    if (static_cast<size_t>(place) == option.chain.size()) return;
    arrived_[part * problem_.longest + place] = now;
    known_[option.chain[place].resource] = false;
    if (option.chain[place].resource == 0) compute_.push_back({now, part, place});
}

static bool before(const Waiting &a, const Waiting &b) {
    return a.since != b.since ? a.since < b.since : a.part < b.part || (a.part == b.part && a.place < b.place);
}

// What the resource serves next, if it may serve anything.
const Waiting *Machine::first(const std::vector<Part> &parts, int resource) {
    Waiting &found = first_[resource];
    if (known_[resource]) return found.part < 0 ? nullptr : &found;
    known_[resource] = true;
    found.part = -1;
    if (resource == 0) {
        if (!compute_.empty()) found = *std::min_element(compute_.begin(), compute_.end(), before);
        return found.part < 0 ? nullptr : &found;
    }
    const int count = static_cast<int>(parts.size()), turns = problem_.turns[resource];
    const int *places = problem_.place[resource].data();
    for (int turn = 0; turn < turns; ++turn) {
        int &head = head_[resource][turn];
        while (head < count && places[parts[head].option * turns + turn] < 0) ++head;
        if (head == count) continue;
        const int place = places[parts[head].option * turns + turn];
        const Waiting waiting{arrived_[head * problem_.longest + place], head, place};
        if (waiting.since != kNever && (found.part < 0 || before(waiting, found))) found = waiting;
    }
    return found.part < 0 ? nullptr : &found;
}

void Machine::leave(const std::vector<Part> &parts, int resource, const Waiting &served) {
    known_[resource] = false;
    if (resource)
        ++head_[resource][problem_.options[parts[served.part].option].turn[served.place]];
    else
        compute_.erase(std::find_if(compute_.begin(), compute_.end(), [&](const Waiting &other) {
            return other.part == served.part && other.place == served.place;
        }));
}

double Machine::play(const std::vector<Part> &parts, double limit) {
    const size_t longest = problem_.longest;
    const int count = static_cast<int>(parts.size());
    seconds_.resize(parts.size() * longest);
    for (size_t p = 0; p < parts.size(); ++p)
        problem_.price(parts[p].option, parts[p].start, parts[p].stop, seconds_.data() + p * longest);
    arrived_.assign(parts.size() * longest, kNever);
    compute_.clear();
    double left[kResources] = {};  // what the demands that are not served yet take
    for (int p = 0; p < count; ++p) {
        const std::vector<Demand> &chain = problem_.options[parts[p].option].chain;
        demands += chain.size();
        for (size_t i = 0; i < chain.size(); ++i) left[chain[i].resource] += seconds_[p * longest + i];
    }
    for (int r = 0; r < kResources; ++r) {
        head_[r].assign(problem_.turns[r], 0);
        known_[r] = false;
    }
    limit *= 1 + 1e-9;  // `left` is a sum in another order

    const double whole = problem_.ready.back() + problem_.rest;  // backward
    const auto goal = [&](int part) { return part < count ? problem_.ready[parts[part].stop] : whole; };
    int ready = -1;        // parts that are; backward is on the way to the next one, or to its end
    double now = 0.0, begun = 0.0, left_of_way = 0.0;
    int instants = 0;      // items at the end of the way that take backward no time,
    double since = 0.0;    // the first of which waits since then
    bool stopped = false;  // backward is, by a demand
    double ends[kResources] = {kNever, kNever, kNever, kNever};  // of the demand that is served
    Waiting served[kResources] = {};
    const auto arrived = [&] {
        if (ready >= 0 && ready < count) arrive(parts, now, ready, 0);
        ++ready;
        begun = since = now;
        if (ready <= count) left_of_way = goal(ready) - (ready ? goal(ready - 1) : 0.0);
        instants = 0;
        if (ready >= count) return;
        const Part &part = parts[ready];
        instants = std::min(problem_.instants[part.stop], part.stop - part.start);
    };
    arrived();
    for (;;) {
        // Begin, one at a time: what takes no time ends before the next begins.
        for (bool begins = true; begins;) {
            begins = false;
            int chosen = 0;
            const Waiting *next = ends[0] == kNever ? first(parts, 0) : nullptr;
            if (next) {
                if (!stopped && ready <= count) left_of_way = std::max(left_of_way - (now - begun), 0.0);
                stopped = true;
            }
            const bool instant = !next && ends[0] == kNever && left_of_way == 0.0 && instants > 0;
            for (int r = 1; r < kResources && !(next && chosen == 0); ++r) {
                const Waiting *other = ends[r] == kNever ? first(parts, r) : nullptr;
                if (!other || (next && !before(*other, *next))) continue;
                chosen = r;
                next = other;
            }
            if (instant && (!next || before({since, ready, -1}, *next))) {
                begins = true;
                since = now;
                if (--instants == 0) arrived();
            } else if (next) {
                begins = true;
                const Waiting beginning = served[chosen] = *next;
                const double taken = seconds_[beginning.part * longest + beginning.place];
                const double behind = chosen || ready > count ? 0.0 : left_of_way + (whole - goal(ready));
                if (now + left[chosen] + behind >= limit) return kNever;
                left[chosen] -= taken;
                leave(parts, chosen, beginning);
                if (taken > 0.0)
                    ends[chosen] = now + taken;
                else
                    arrive(parts, now, beginning.part, beginning.place + 1);
            } else if (ends[0] == kNever) {
                if (stopped) begun = now;
                stopped = false;
            }
        }
        const bool goes = !stopped && ready <= count && (left_of_way > 0.0 || instants == 0);
        const double arrival = goes ? begun + left_of_way : kNever;
        const double next = std::min({arrival, ends[0], ends[1], ends[2], ends[3]});
        if (next == kNever) return now;
        now = next;
        for (int r = 0; r < kResources; ++r) {
            if (ends[r] != now) continue;
            ends[r] = kNever;
            arrive(parts, now, served[r].part, served[r].place + 1);
        }
        if (arrival != now) continue;
        left_of_way = 0.0;
        since = now;
        if (instants == 0) arrived();
    }
}

}  // namespace search
