#include "search.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <initializer_list>
#include <numeric>

namespace search {
namespace {

constexpr int kPending = 3;
constexpr size_t kStarts = 8;      // plans of the program that are played
constexpr double kSpreads[] = {0.03, 0.2};  // how much all weighings count beside the worst one, in turn
constexpr double kGain = 1e-9;     // less is rounding
constexpr double kHope = 1.02;     // a screened plan is worth playing up to so many times the best one's seconds
constexpr size_t kTurns = 6;       // plans that are improved first, each with a share of the demands
constexpr int kWindow = 4;         // parts that a kick draws anew, at most
constexpr int kPatience = 50;      // kicks that may fail, one after another
constexpr double kLeast = 4.0, kMost = 512.0;  // labels at a position

struct Pending {
    double since = 0.0, seconds = 0.0;
};

// Where the program has come to: each resource is free at `free`, which for COMPUTE is where backward stands.
struct Label {
    Load free{};
    std::array<Pending, kPending> pending{};  // demands that will interrupt backward, by time
    int waiting = 0;                          // of them
    double done = 0.0, score = 0.0;
    int from = 0, parent = 0, option = 0;

    double work() const {
        double sum = free[0];
        for (int i = 0; i < waiting; ++i) sum += pending[i].seconds;
        return sum;
    }

    bool before(const Label &other) const {
        for (int r = 0; r < kResources; ++r)
            if (free[r] > other.free[r]) return false;
        return done <= other.done && work() <= other.work();
    }

    void defer(double since, double seconds) {
        if (waiting == kPending) {  // the first two become one
            pending[1] = {pending[0].since, pending[0].seconds + pending[1].seconds};
            std::move(pending.begin() + 1, pending.end(), pending.begin());
            --waiting;
        }
        int place = waiting++;
        for (; place > 0 && pending[place - 1].since > since; --place) pending[place] = pending[place - 1];
        pending[place] = {since, seconds};
    }

    // Backward goes on for so long, interrupted by what has come to COMPUTE by then.
    void advance(double seconds) {
        double now = free[0] + seconds;
        int gone = 0;
        for (; gone < waiting && pending[gone].since < now; ++gone) now += pending[gone].seconds;
        std::move(pending.begin() + gone, pending.end(), pending.begin());
        waiting -= gone;
        free[0] = now;
    }

    void serve(const Option &option, const double *seconds) {
        double at = free[0];
        for (size_t i = 0; i < option.chain.size(); ++i) {
            const int r = option.chain[i].resource;
            if (i < option.lead) {
                free[0] = at = at + seconds[i];
            } else if (r == 0) {
                defer(at, seconds[i]);
                at += seconds[i];
            } else {
                at = std::max(free[r], at) + seconds[i];
                // A second demand comes late, and others go before it: only its load counts.
                free[r] = option.turn[i] ? free[r] + seconds[i] : at;
            }
        }
        done = std::max(done, at);
        for (int r = 1; r < kResources; ++r) free[r] = std::max(free[r], free[0]);
    }

    double finish(double rest) const {
        Label last = *this;
        last.advance(rest);
        double now = last.free[0];
        for (int i = 0; i < last.waiting; ++i) now = std::max(now, last.pending[i].since) + last.pending[i].seconds;
        return std::max({now, done, last.free[1], last.free[2], last.free[3]});
    }
};

// A part as a step of the program, from position to position.
struct Way {
    int from, option;
    size_t seconds;  // where those of its demands are
};

// What the program goes through.
struct Ways {
    std::vector<int> places;                 // items before the positions
    std::vector<std::vector<Way>> to;        // by position
    std::vector<double> seconds;
    std::vector<std::vector<double>> ahead;  // by position and weights: the least weighed load of what follows
    double count = 0;
};

class Search {
   public:
    Search(const Problem &problem, const Settings &settings)
        : problem_(problem),
          settings_(settings),
          weights_(weights_of(problem)),
          machine_(problem),
          options_(worthwhile()) {}

    Solution run() {
        fixed_sizes();
        const std::vector<int> places = positions();
        std::vector<Solution> starts{best_};
        const Ways ways = ways_between(places, options_);
        for (double spread : kSpreads) {
            const std::vector<Solution> found = program(ways, settings_.transitions / 2.0, spread);
            starts.insert(starts.end(), found.begin(), found.end());
        }
        const double share = settings_.transitions / (2.0 * static_cast<double>(options_.size()));
        for (int option : options_) {
            if (options_.size() == 1) break;
            const std::vector<Solution> found = program(ways_between(places, {option}), share, kSpreads[0]);
            if (!found.empty()) starts.push_back(found[0]);
        }
        std::stable_sort(starts.begin(), starts.end(),
                         [](const Solution &a, const Solution &b) { return a.seconds < b.seconds; });
        for (size_t i = 0; i < starts.size() && !spent(); ++i) {
            const bool known = std::any_of(starts.begin(), starts.begin() + i, [&](const Solution &other) {
                return other.parts == starts[i].parts;
            });
            if (!known) polish(starts[i], machine_.demands + settings_.demands / kTurns);
        }
        polish(best_, settings_.demands);
        for (int patience = kPatience; patience > 0 && !spent(); --patience) {
            const double before = best_.seconds;
            const Solution kicked = redrawn();
            if (kicked.seconds < kNever) polish(kicked, settings_.demands);
            if (best_.seconds < before) patience = kPatience;
        }
        return best_;
    }

   private:
    bool spent() const { return machine_.demands >= settings_.demands; }

    bool may(int start, int stop, int option) const {
        return stop - start <= settings_.max_items && problem_.may(start, stop, option);
    }

    Solution played(std::vector<Part> parts) {
        Solution solution{std::move(parts), 0.0};
        solution.seconds = machine_.play(solution.parts);
        if (solution.seconds < best_.seconds) best_ = solution;
        return solution;
    }

    // Options that no other is before in everything, for some part of the sizes that parts have.
    std::vector<int> worthwhile() const {
        const int count = static_cast<int>(problem_.options.size());
        std::vector<std::vector<double>> seconds(count, std::vector<double>(problem_.longest));
        std::vector<char> wanted(count);
        const auto replaces = [&](int a, int b) {
            return problem_.beats(a, seconds[a].data(), b, seconds[b].data()) && problem_.as_free(a, b);
        };
        for (int length = 1; length <= problem_.size; length *= 2)
            for (int i = 0; i < 4; ++i) {
                const int start = static_cast<int>(static_cast<int64_t>(problem_.size - length) * i / 3);
                for (int o = 0; o < count; ++o) problem_.price(o, start, start + length, seconds[o].data());
                for (int o = 0; o < count; ++o) {
                    bool replaced = false;
                    for (int other = 0; other < count && !wanted[o] && !replaced; ++other)
                        replaced = other != o && replaces(other, o) && (other < o || !replaces(o, other));
                    if (!replaced) wanted[o] = 1;
                }
            }
        std::vector<int> kept;
        for (int o = 0; o < count; ++o)
            if (wanted[o]) kept.push_back(o);
        return kept;
    }

    // With one option, buckets closed as soon as they hold so much: nothing, all, a half, a quarter and so on.
    void fixed_sizes() {
        const std::vector<double> &sums = problem_.amounts[0];
        for (int option : options_)
            for (int step = 0; step < 10; ++step) {
                const double size = step ? std::ldexp(sums.back(), 1 - step) : 0.0;
                std::vector<Part> parts;
                int start = 0;
                for (int i = 1; i <= problem_.size; ++i) {
                    const bool full = sums[i] - sums[start] >= size || i == problem_.size;
                    if (!full && may(start, i + 1, option)) continue;
                    if (!may(start, i, option)) break;
                    parts.push_back({start, i, option});
                    start = i;
                }
                if (start == problem_.size) played(std::move(parts));
            }
    }

    // Places to cut, about as many as wanted and as can be afforded: close where the bytes or the time are.
    std::vector<int> positions() const {
        const int size = problem_.size;
        const double affordable = std::sqrt(settings_.transitions / (kLeast * static_cast<double>(options_.size())));
        const int wanted = std::min(settings_.positions, static_cast<int>(affordable) + 1);
        std::vector<int> chosen(size + 1);
        std::iota(chosen.begin(), chosen.end(), 0);
        if (size <= wanted || settings_.max_items < size) return chosen;
        const std::vector<double> &sums = problem_.amounts[0], &ready = problem_.ready;
        std::vector<double> share{0.0};
        for (int i = 1; i <= size; ++i)
            share.push_back(share.back() + 0.5 / size + (sums[i] - sums[i - 1]) / std::max(sums.back(), 1e-300) +
                            (ready[i] - ready[i - 1]) / std::max(ready.back(), 1e-300));
        for (double step = share.back() / wanted; step < share.back(); step *= 1.1) {
            chosen.assign(1, 0);
            for (int i = 1; i < size; ++i)
                if (share[i + 1] - share[chosen.back()] > step || must_cut(i)) chosen.push_back(i);
            chosen.push_back(size);
            if (static_cast<int>(chosen.size()) <= wanted + 1) break;
        }
        return chosen;
    }

    bool must_cut(int i) const {
        if (!problem_.may_join(i - 1, i + 1)) return true;
        return std::any_of(problem_.refused.begin(), problem_.refused.end(), [&](const std::vector<int> &refused) {
            return (refused[i] > refused[i - 1]) != (refused[i + 1] > refused[i]);
        });
    }

    Ways ways_between(const std::vector<int> &places, const std::vector<int> &options) const {
        const int count = static_cast<int>(places.size());
        Ways ways{places, std::vector<std::vector<Way>>(count), {}, {}, 0};
        for (int j = 1; j < count; ++j)
            for (int i = j - 1; i >= 0 && places[j] - places[i] <= settings_.max_items; --i)
                for (int o : options) {
                    if (!may(places[i], places[j], o)) continue;
                    const size_t begin = ways.seconds.size();
                    ways.to[j].push_back({i, o, begin});
                    ways.seconds.resize(begin + problem_.longest);
                    problem_.price(o, places[i], places[j], ways.seconds.data() + begin);
                    ++ways.count;
                }
        look_ahead(ways);
        return ways;
    }

    void look_ahead(Ways &ways) const {
        std::vector<std::vector<double>> &ahead = ways.ahead;
        ahead.assign(ways.to.size(), std::vector<double>(weights_.size(), kNever));
        std::fill(ahead.back().begin(), ahead.back().end(), 0.0);
        for (size_t j = ways.to.size() - 1; j > 0; --j)
            for (const Way &way : ways.to[j]) {
                Load load{};
                const std::vector<Demand> &chain = problem_.options[way.option].chain;
                for (size_t i = 0; i < chain.size(); ++i) load[chain[i].resource] += ways.seconds[way.seconds + i];
                for (size_t w = 0; w < weights_.size(); ++w) {
                    double cost = ahead[j][w];
                    for (int r = 0; r < kResources; ++r) cost += weights_[w][r] * load[r];
                    ahead[way.from][w] = std::min(ahead[way.from][w], cost);
                }
            }
    }

    // Label setting over the positions; the best few plans that it finds, played.
    std::vector<Solution> program(const Ways &ways, double transitions, double spread) {
        const std::vector<int> &places = ways.places;
        const int count = static_cast<int>(places.size());
        const double fit = transitions / std::max(ways.count, 1.0);
        const size_t width = static_cast<size_t>(std::clamp(fit, kLeast, kMost));
        std::vector<std::vector<Label>> labels(count);
        labels[0].emplace_back();
        std::vector<Label> candidates;
        for (int j = 1; j < count; ++j) {
            candidates.clear();
            const double behind = problem_.ready.back() + problem_.rest - problem_.ready[places[j]];
            for (const Way &way : ways.to[j]) {
                const double gap = problem_.ready[places[j]] - problem_.ready[places[way.from]];
                for (size_t s = 0; s < labels[way.from].size(); ++s) {
                    Label label = labels[way.from][s];
                    label.advance(gap);
                    label.serve(problem_.options[way.option], ways.seconds.data() + way.seconds);
                    const double work = label.work() + behind;
                    double most = label.done, sum = 0.0;
                    for (size_t w = 0; w < weights_.size(); ++w) {
                        double reach = weights_[w][0] * work + ways.ahead[j][w];
                        for (int r = 1; r < kResources; ++r) reach += weights_[w][r] * label.free[r];
                        most = std::max(most, reach);
                        sum += reach;
                    }
                    if (most >= best_.seconds * kHope) continue;
                    label.score = most + spread * sum / static_cast<double>(weights_.size());
                    label.from = way.from;
                    label.parent = static_cast<int>(s);
                    label.option = way.option;
                    candidates.push_back(label);
                }
            }
            labels[j] = kept(candidates, width, j + 1 == count);
        }

        std::vector<std::pair<double, size_t>> ends;
        for (size_t l = 0; l < labels.back().size(); ++l) ends.push_back({labels.back()[l].finish(problem_.rest), l});
        std::sort(ends.begin(), ends.end());
        ends.resize(std::min(ends.size(), kStarts));
        std::vector<Solution> found;
        for (const auto &end : ends) {
            std::vector<Part> parts;
            size_t l = end.second;
            for (int j = count - 1; j > 0;) {
                const Label &label = labels[j][l];
                parts.push_back({places[label.from], places[j], label.option});
                l = static_cast<size_t>(label.parent);
                j = label.from;
            }
            std::reverse(parts.begin(), parts.end());
            found.push_back(played(std::move(parts)));
        }
        return found;
    }

    // The candidates with the best scores, without those that another one is before in everything.
    static std::vector<Label> kept(const std::vector<Label> &candidates, size_t width, bool last) {
        std::vector<std::pair<double, size_t>> order;
        for (size_t c = 0; c < candidates.size(); ++c) order.push_back({candidates[c].score, c});
        const std::greater<> later;
        std::make_heap(order.begin(), order.end(), later);
        std::vector<Label> chosen;
        for (auto end = order.end(); end != order.begin() && chosen.size() < width; --end) {
            std::pop_heap(order.begin(), end, later);
            const Label &label = candidates[(end - 1)->second];
            const auto beats = [&](const Label &other) { return other.before(label); };
            if (last || std::none_of(chosen.begin(), chosen.end(), beats)) chosen.push_back(label);
        }
        return chosen;
    }

    // Moves at one part after another, until none gains anything or so many demands have been served.
    void polish(Solution now, size_t demands) {
        size_t unchanged = 0;
        demands = std::min(demands, settings_.demands);
        for (size_t p = 0; unchanged < now.parts.size() && machine_.demands < demands; ++p) {
            if (p >= now.parts.size()) p = 0;
            bool gained = other_option(now, p);
            gained |= shift(now, p);
            gained |= merge(now, p);
            gained |= split(now, p);
            gained |= group(now, p);
            unchanged = gained ? 0 : unchanged + 1;
        }
        if (now.seconds < best_.seconds) best_ = now;
    }

    bool better(Solution &now, std::vector<Part> parts) {
        const double seconds = machine_.play(parts, now.seconds * (1 - kGain));
        if (seconds >= now.seconds * (1 - kGain)) return false;
        now = {std::move(parts), seconds};
        return true;
    }

    // The parts `first` and `count` - 1 more become others, if they may and it is better.
    bool replace(Solution &now, size_t first, size_t count, std::initializer_list<Part> by) {
        for (const Part &part : by)
            if (!may(part.start, part.stop, part.option)) return false;
        std::vector<Part> parts(now.parts.begin(), now.parts.begin() + first);
        parts.insert(parts.end(), by);
        parts.insert(parts.end(), now.parts.begin() + first + count, now.parts.end());
        return better(now, std::move(parts));
    }

    bool other_option(Solution &now, size_t p) {
        bool gained = false;
        for (int o : options_) {
            const Part part = now.parts[p];
            if (o != part.option) gained |= replace(now, p, 1, {{part.start, part.stop, o}});
        }
        return gained;
    }

    bool shift(Solution &now, size_t p) {
        bool gained = false;
        for (int sign : {-1, 1})
            for (int step = 1; p + 1 < now.parts.size(); step *= 2) {
                const Part a = now.parts[p], b = now.parts[p + 1];
                const int cut = a.stop + sign * step;
                if (cut <= a.start || cut >= b.stop) break;
                gained |= replace(now, p, 2, {{a.start, cut, a.option}, {cut, b.stop, b.option}});
            }
        return gained;
    }

    bool merge(Solution &now, size_t p) {
        if (p + 1 >= now.parts.size()) return false;
        const int start = now.parts[p].start, stop = now.parts[p + 1].stop;
        return std::any_of(options_.begin(), options_.end(),
                           [&](int o) { return replace(now, p, 2, {{start, stop, o}}); });
    }

    bool split(Solution &now, size_t p) {
        const Part part = now.parts[p];
        for (int cut : cuts(part))
            for (int o : options_) {
                if (replace(now, p, 1, {{part.start, cut, part.option}, {cut, part.stop, o}})) return true;
                if (o == part.option) continue;
                if (replace(now, p, 1, {{part.start, cut, o}, {cut, part.stop, part.option}})) return true;
            }
        return false;
    }

    // Where a part is worth cutting: anywhere if it is short, else by quarters of its bytes and its time, and its ends.
    std::vector<int> cuts(const Part &part) const {
        std::vector<int> found;
        if (part.stop - part.start <= 9) {
            for (int cut = part.start + 1; cut < part.stop; ++cut) found.push_back(cut);
            return found;
        }
        found = {part.start + 1, part.stop - 1};
        for (const std::vector<double> *sums : {&problem_.amounts[0], &problem_.ready})
            for (double share : {0.25, 0.5, 0.75}) {
                const double goal = (*sums)[part.start] + share * ((*sums)[part.stop] - (*sums)[part.start]);
                const auto begin = sums->begin() + part.start + 1, end = sums->begin() + part.stop - 1;
                found.push_back(static_cast<int>(std::lower_bound(begin, end, goal) - sums->begin()));
            }
        std::sort(found.begin(), found.end());
        found.erase(std::unique(found.begin(), found.end()), found.end());
        return found;
    }

    // The part and the next ones with its option take another one together.
    bool group(Solution &now, size_t p) {
        bool gained = false;
        for (int o : options_)
            for (int wanted : {2, 3, 4, 6, 8, 12, 16, 24, 32}) {
                const int old = now.parts[p].option;
                if (o == old) break;
                std::vector<Part> changed = now.parts;
                int count = 0;
                for (size_t i = p; i < changed.size() && count < wanted; ++i)
                    if (changed[i].option == old && may(changed[i].start, changed[i].stop, o)) {
                        changed[i].option = o;
                        ++count;
                    }
                if (count < wanted) break;
                gained |= better(now, std::move(changed));
            }
        return gained;
    }

    // The best plan, some parts of which are drawn anew; never, where what is drawn may not be.
    Solution redrawn() {
        const int count = static_cast<int>(best_.parts.size());
        if (count == 0) return {};
        const int window = 1 + draw(std::min(count, kWindow)), first = draw(count - window + 1);
        std::vector<Part> parts(best_.parts.begin(), best_.parts.begin() + first);
        const int end = best_.parts[first + window - 1].stop;
        for (int start = best_.parts[first].start; start < end; start = parts.back().stop) {
            const int stop = start + 1 + draw(end - start), option = options_[draw(static_cast<int>(options_.size()))];
            if (!may(start, stop, option)) return {};
            parts.push_back({start, stop, option});
        }
        parts.insert(parts.end(), best_.parts.begin() + first + window, best_.parts.end());
        return played(std::move(parts));
    }

    // A number below `count`, of a sequence that is the same everywhere.
    int draw(int count) {
        random_ = random_ * 6364136223846793005u + 1442695040888963407u;
        return static_cast<int>((random_ >> 33) % static_cast<uint64_t>(count));
    }

    const Problem &problem_;
    const Settings settings_;
    const std::vector<Load> weights_;
    Machine machine_;
    uint64_t random_ = 0;
    const std::vector<int> options_;
    Solution best_;
};

}  // namespace

std::vector<Load> weights_of(const Problem &problem) {
    std::vector<int> used{0};
    for (int r = 1; r < kResources; ++r)
        if (problem.turns[r]) used.push_back(r);
    std::vector<Load> rows;
    for (int r : used) {
        rows.emplace_back();
        rows.back()[r] = 1.0;
    }
    for (size_t i = 0; i < used.size(); ++i)
        for (size_t j = i + 1; j < used.size(); ++j)
            for (double share : {0.25, 0.5, 0.75}) {
                if (i > 0 && share != 0.5) continue;  // COMPUTE is what all others are weighed against
                rows.emplace_back();
                rows.back()[used[i]] = share;
                rows.back()[used[j]] = 1 - share;
            }
    return rows;
}

Solution find(const Problem &problem, const Settings &settings) {
    if (problem.size == 0) return {{}, problem.rest};
    return Search(problem, settings).run();
}

Solution exhaust(const Problem &problem, int max_items) {
    Machine machine(problem);
    Solution best;
    std::vector<Part> parts;
    const std::function<void(int)> extend = [&](int start) {
        if (start == problem.size) {
            const double seconds = machine.play(parts, best.seconds);
            if (seconds < best.seconds) best = {parts, seconds};
            return;
        }
        for (int stop = start + 1; stop <= std::min(problem.size, start + max_items); ++stop)
            for (int o = 0; o < static_cast<int>(problem.options.size()); ++o) {
                if (!problem.may(start, stop, o)) continue;
                parts.push_back({start, stop, o});
                extend(stop);
                parts.pop_back();
            }
    };
    extend(0);
    return best;
}

}  // namespace search
