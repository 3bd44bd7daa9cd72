#include <algorithm>
#include <cmath>
#include <numeric>

#include "search.hpp"

namespace search {
namespace {

// Label setting on a relaxation: see lower_bound in joint.py, which names the coordinates and proves them.
class Bound {
   public:
    Bound(const Problem &problem, double upper, int max_items, size_t labels)
        : problem_(problem),
          upper_(upper),
          max_items_(max_items),
          labels_(labels),
          weights_(weights_of(problem)),
          options_(problem.undominated()) {
        width_ = 2;
        for (int r = 1; r < kResources; ++r) {
            turns_at_[r] = width_;
            width_ += problem.turns[r];
            load_at_[r] = width_ - 1;
            if (problem.turns[r] > 1) load_at_[r] = width_++;
        }
        follow_ = width_++;
        found_ = width_++;
        find_follower();
        seconds_.resize(problem.options.size() * problem.longest);
        whole_ = problem.ready.back() + problem.rest;
    }

    double run() {
        const int size = problem_.size;
        look_ahead();
        std::vector<std::vector<double>> reached(size + 1);
        std::vector<std::vector<double>> floors(size + 1);  // the least of each coordinate
        reached[0].assign(width_, 0.0);
        floors[0] = reached[0];
        std::vector<double> next(width_), candidates;
        for (int k = 1; k <= size; ++k) {
            candidates.clear();
            for (int q = k - 1; q >= 0 && k - q <= max_items_; --q) {
                if (!problem_.may_join(q, k)) break;
                if (reached[q].empty()) continue;
                const double gap = problem_.ready[k] - problem_.ready[q];
                hopeful_.clear();
                for (int o : options_) {
                    if (!problem_.may(q, k, o)) continue;
                    double *seconds = seconds_.data() + o * problem_.longest;
                    problem_.price(o, q, k, seconds);
                    if (step(floors[q].data(), gap, o, seconds, k, next.data())) hopeful_.push_back(o);
                }
                for (int o : hopeful_) {
                    if (beaten(o)) continue;
                    const double *seconds = seconds_.data() + o * problem_.longest;
                    for (size_t l = 0; l < reached[q].size(); l += width_)
                        if (step(&reached[q][l], gap, o, seconds, k, next.data()))
                            candidates.insert(candidates.end(), next.begin(), next.end());
                }
                if (candidates.size() > 64 * labels_ * width_) merge(candidates);
            }
            merge(candidates);
            reached[k] = candidates;
            floors[k].assign(width_, kNever);
            for (size_t l = 0; l < candidates.size(); l += width_)
                for (size_t c = 0; c < width_; ++c) floors[k][c] = std::min(floors[k][c], candidates[l + c]);
        }
        return size ? std::min(upper_, floors[size][found_]) : whole_;
    }

   private:
    // Behind which turn of which link most chains go on to COMPUTE for the last time.
    void find_follower() {
        std::vector<std::array<int, 3>> seen;  // how many, resource, turn
        for (const Option &option : problem_.options) {
            const size_t last = last_link(option);
            lasts_.push_back(last);
            if (last == option.chain.size() || last + 1 == option.chain.size()) continue;
            const int resource = option.chain[last].resource, turn = option.turn[last];
            const auto same = std::find_if(seen.begin(), seen.end(), [&](const std::array<int, 3> &entry) {
                return entry[1] == resource && entry[2] == turn;
            });
            if (same == seen.end())
                seen.push_back({1, resource, turn});
            else
                ++(*same)[0];
        }
        if (seen.empty()) return;
        const auto most = std::max_element(seen.begin(), seen.end());
        follower_resource_ = (*most)[1];
        follower_turn_ = (*most)[2];
    }

    static size_t last_link(const Option &option) {
        size_t last = option.chain.size();
        for (size_t i = 0; i < option.chain.size(); ++i)
            if (option.chain[i].resource) last = i;
        return last;
    }

    // Whether another option is before this one for the part that `seconds_` are of.
    bool beaten(int option) const {
        const double *mine = seconds_.data() + option * problem_.longest;
        return std::any_of(hopeful_.begin(), hopeful_.end(), [&](int other) {
            const double *its = seconds_.data() + other * problem_.longest;
            if (other == option || !problem_.beats(other, its, option, mine)) return false;
            return other < option || !problem_.beats(option, mine, other, its);
        });
    }

    // By item and weights: the least weighed load of what follows; and the least time of a part with the last item.
    void look_ahead() {
        const int size = problem_.size;
        ahead_.assign((size + 1) * weights_.size(), kNever);
        std::fill(ahead_.end() - weights_.size(), ahead_.end(), 0.0);
        for (int q = size - 1; q >= 0; --q)
            for (int k = q + 1; k <= size && k - q <= max_items_; ++k) {
                if (!problem_.may_join(q, k)) break;
                for (int o : options_) {
                    if (!problem_.may(q, k, o)) continue;
                    problem_.price(o, q, k, seconds_.data());
                    Load load{};
                    const std::vector<Demand> &chain = problem_.options[o].chain;
                    double all = 0.0;
                    for (size_t i = 0; i < chain.size(); ++i) {
                        load[chain[i].resource] += seconds_[i];
                        all += seconds_[i];
                    }
                    if (k == size) last_ = std::min(last_, all);
                    for (size_t w = 0; w < weights_.size(); ++w) {
                        double cost = ahead_[k * weights_.size() + w];
                        for (int r = 0; r < kResources; ++r) cost += weights_[w][r] * load[r];
                        double &least = ahead_[q * weights_.size() + w];
                        least = std::min(least, cost);
                    }
                }
            }
    }

    // Whether a plan through this label may take less than `upper`.
    bool step(const double *label, double gap, int number, const double *seconds, int k, double *next) const {
        const Option &option = problem_.options[number];
        std::copy_n(label, width_, next);
        double at = label[0] + gap, work = label[1] + gap;
        for (size_t i = 0; i < option.lead; ++i) at += seconds[i];
        next[0] = at;
        const size_t last = lasts_[number];
        for (size_t i = 0; i < option.chain.size(); ++i) {
            const int r = option.chain[i].resource;
            if (r == 0) {
                work += seconds[i];
                if (i >= option.lead) at += seconds[i];
                continue;
            }
            if (problem_.turns[r] > 1) {
                double &load = next[load_at_[r]];
                if (option.turn[i] == 0) load = std::max(load, at);
                load += seconds[i];
            }
            double &turn = next[turns_at_[r] + option.turn[i]];
            at = turn = std::max(turn, at) + seconds[i];
            if (i == last && i + 1 < option.chain.size() && r == follower_resource_ &&
                option.turn[i] == follower_turn_) {
                double &follow = next[follow_];
                follow = std::max(follow, at);
                for (size_t j = i + 1; j < option.chain.size(); ++j) follow += seconds[j];
            }
        }
        next[1] = work;
        const double behind = whole_ - problem_.ready[k];
        double found = std::max({label[found_], at, next[follow_]});
        if (k < problem_.size) found = std::max(found, next[0] + (problem_.ready.back() - problem_.ready[k]) + last_);
        const double *ahead = ahead_.data() + k * weights_.size();
        for (size_t w = 0; w < weights_.size(); ++w) {
            double reach = weights_[w][0] * (work + behind) + ahead[w];
            for (int r = 1; r < kResources; ++r) reach += weights_[w][r] * next[load_at_[r]];
            found = std::max(found, reach);
        }
        next[found_] = found;
        // Later parts come to a link when backward has brought them: what was before no longer matters.
        for (size_t c = 2; c < follow_; ++c) next[c] = std::max(next[c], next[0]);
        return found < upper_;
    }

    // Labels that others are below are dropped, and as long as there are too many, near ones become their least.
    void merge(std::vector<double> &labels) const {
        const auto count = [&] { return labels.size() / width_; };
        double cell = upper_ * 1e-6;
        drop(labels);
        while (count() > labels_) {
            std::vector<std::vector<int64_t>> cells(count(), std::vector<int64_t>(width_));
            std::vector<size_t> order(count());
            for (size_t l = 0; l < count(); ++l) {
                order[l] = l;
                for (size_t c = 0; c < width_; ++c)
                    cells[l][c] = static_cast<int64_t>(std::floor(labels[l * width_ + c] / cell));
            }
            std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
                return cells[a] != cells[b] ? cells[a] < cells[b] : a < b;
            });
            std::vector<double> merged;
            for (size_t i = 0; i < order.size(); ++i) {
                const double *label = &labels[order[i] * width_];
                if (i == 0 || cells[order[i]] != cells[order[i - 1]])
                    merged.insert(merged.end(), label, label + width_);
                else
                    for (size_t c = 0; c < width_; ++c) {
                        double &least = merged[merged.size() - width_ + c];
                        least = std::min(least, label[c]);
                    }
            }
            labels = std::move(merged);
            if (count() > labels_) drop(labels);
            cell *= 2;
        }
    }

    void drop(std::vector<double> &labels) const {
        std::vector<size_t> order(labels.size() / width_);
        std::iota(order.begin(), order.end(), 0);
        std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
            const double *x = &labels[a * width_], *y = &labels[b * width_];
            return std::lexicographical_compare(x, x + width_, y, y + width_) ||
                   (std::equal(x, x + width_, y) && a < b);
        });
        std::vector<double> kept;
        for (size_t l : order) {
            const double *label = &labels[l * width_];
            bool beaten = false;
            for (size_t other = 0; other < kept.size() && !beaten; other += width_) {
                beaten = true;
                for (size_t c = 0; c < width_ && beaten; ++c) beaten = kept[other + c] <= label[c];
            }
            if (!beaten) kept.insert(kept.end(), label, label + width_);
        }
        labels = std::move(kept);
    }

    const Problem &problem_;
    const double upper_;
    const int max_items_;
    const size_t labels_;
    const std::vector<Load> weights_;
    const std::vector<int> options_;
    std::vector<size_t> lasts_;  // by option: the last demand on a link
    size_t width_ = 0, follow_ = 0, found_ = 0;
    size_t turns_at_[kResources] = {}, load_at_[kResources] = {};
    int follower_resource_ = -1, follower_turn_ = -1;
    double whole_ = 0.0, last_ = kNever;
    std::vector<double> ahead_, seconds_;
    std::vector<int> hopeful_;
};

}  // namespace

double lower_bound(const Problem &problem, double upper, int max_items, size_t labels) {
    return Bound(problem, upper, max_items, labels).run();
}

}  // namespace search
