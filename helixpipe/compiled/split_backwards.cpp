// The twin of planning/order/list_scheduling.py, where everything is explained: the same sums in the same order.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <queue>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

using Numbers = std::vector<int>;
using Figures = std::vector<double>;
using ByStage = std::vector<Figures>;

constexpr double kNever = std::numeric_limits<double>::infinity();

enum Kind : int { kF, kI, kW, kNothing };

// As problem.Problem. microbatches: of each unit in the order of F; needed: the places of units in the order of I.
struct Problem {
  Numbers homes, microbatches, starts, needed;
  std::vector<Numbers> own;
  ByStage forward, inputs, weights, message, held, deferred, added, left;
  Figures limit, reserve, work;

  int stages() const { return static_cast<int>(homes.size()); }
  int units() const { return static_cast<int>(needed.size()); }
};

// As list_scheduling.Rules. Pairs are a kind with the place of a stage on its rank, or of an order with a stage.
struct Rules {
  std::vector<std::pair<int, int>> prefer;
  std::vector<std::vector<std::pair<int, int>>> order;
  int ahead;
  bool in_turn, make_room;
  Figures deferred, warmup;
  double patience;
};

// ranks: of each its ops, as (kind x stages + stage) x units + place of the unit.
struct Found {
  bool stuck = false, abandoned = false;
  double makespan = 0.0, span = 0.0, memory = 0.0;
  std::vector<Numbers> ranks;
};

struct Stage {
  int number = 0, rank = 0, place = 0;
  Numbers later;
  Figures forwards_ready, inputs_ready;
  int forwards_done = 0, inputs_done = 0;
};

struct Choice {
  int kind, stage, place;
};

struct Rank {
  std::vector<Choice> choices;
  std::size_t turn = 0;
  int alive = 0;
  std::deque<std::pair<int, int>> waiting;
  Numbers order;
  double used = 0.0, peak = 0.0, free = 0.0, begun = kNever, work = 0.0;
  double limit = 0.0, reserve = 0.0, deferred = kNever, warmup = kNever;
};

class Greedy {
 public:
  Greedy(const Problem& given, const Rules& rules) : given_(given), rules_(rules) {
    const std::size_t count = given.own.size();
    ranks_.resize(count);
    stages_.resize(given.homes.size());
    for (int number = 0; number < given.stages(); ++number) {
      stages_[number].number = number;
      stages_[number].rank = given.homes[number];
    }
    for (std::size_t number = 0; number < count; ++number) {
      Rank& rank = ranks_[number];
      const Numbers& own = given.own[number];
      rank.work = given.work[number];
      rank.limit = given.limit[number] * (1 + 1e-9);
      rank.reserve = given.reserve[number];
      if (!rules.deferred.empty()) rank.deferred = rules.deferred[number];
      if (!rules.warmup.empty()) rank.warmup = rules.warmup[number];
      for (std::size_t place = 0; place < own.size(); ++place) stages_[own[place]].place = static_cast<int>(place);
      if (!rules.order.empty()) {
        const auto& fixed = rules.order.at(number);
        for (auto each = fixed.rbegin(); each != fixed.rend(); ++each) {
          rank.choices.push_back({each->first, each->second, 1});
        }
        continue;
      }
      for (const auto& [kind, place] : rules.prefer) rank.choices.push_back({kind, own.at(place), place});
      for (std::size_t place = 0; place < own.size(); ++place) {
        stages_[own[place]].later.assign(own.begin() + static_cast<std::ptrdiff_t>(place) + 1, own.end());
      }
    }
    stages_[0].forwards_ready.assign(given.units(), 0.0);
    events_.emplace(0.0, given.homes[0]);
  }

  Found run(double slowest) {
    while (!events_.empty()) {
      const auto [now, number] = events_.top();
      events_.pop();
      Rank& rank = ranks_[number];
      if (rank.free > now) continue;
      const auto [kind, stage] = choose(rank, now);
      if (kind == kNothing) continue;
      const double end = kind == kW   ? weights(rank, now)
                         : kind == kF ? forward(rank, stages_[stage], now)
                                      : inputs(rank, stages_[stage], now);
      rank.free = end;
      rank.work -= end - now;
      if (end + rank.work > slowest) {
        Found abandoned;
        abandoned.abandoned = true;
        return abandoned;
      }
      if (rank.begun == kNever) rank.begun = now;
      if (rank.used > rank.peak) rank.peak = rank.used;
      events_.emplace(end, number);
    }
    return found();
  }

 private:
  std::pair<int, int> choose(const Rank& rank, double now) const {
    int kind = kNothing, chosen = -1;
    bool held_back = false, crowded = false;
    double soon = kNever;
    const std::size_t count = rank.choices.size();
    const bool fixed = !rules_.order.empty();
    const std::size_t most = fixed ? std::min<std::size_t>(rules_.ahead, count) : count;
    for (std::size_t number = 0; number < most; ++number) {
      const std::size_t at_choice = fixed ? count - 1 - number : (number + rank.turn) % count;
      const Choice& wanted = rank.choices[at_choice];
      const Stage& stage = stages_[wanted.stage];
      const bool is_forward = wanted.kind == kF;
      const int at = is_forward ? stage.forwards_done : stage.inputs_done;
      const Figures& ready = is_forward ? stage.forwards_ready : stage.inputs_ready;
      if (at >= static_cast<int>(ready.size())) continue;
      if (ready[at] > now) {
        if (ready[at] < soon) soon = ready[at];
      } else if (is_forward && rank.used + room(stage) + rank.reserve > rank.limit) {
        held_back = true;
      } else if (!is_forward && !rank.waiting.empty() &&
                 rank.used + given_.added[wanted.stage][given_.needed[at]] > rank.limit) {
        crowded = held_back = true;
      } else if (kind == kNothing && (!is_forward || wanted.place != 0 || rank.alive < rank.warmup)) {
        kind = wanted.kind;
        chosen = wanted.stage;
      }
    }
    if (!rank.waiting.empty()) {
      const auto [oldest, unit] = rank.waiting.front();
      const double weights = given_.weights[oldest][unit];
      if (static_cast<double>(rank.waiting.size()) > rank.deferred || crowded ||
          (held_back && (kind == kNothing || (kind == kI && rules_.make_room))) ||
          (kind == kNothing && (weights == 0.0 || now + weights - soon <= rules_.patience * weights))) {
        return {kW, -1};
      }
    }
    return {kind, chosen};
  }

  double room(const Stage& stage) const {
    double later = 0.0;
    if (!stage.later.empty()) {
      const int microbatch = given_.microbatches[stage.forwards_done];
      const int start = given_.starts[microbatch], end = given_.starts[microbatch + 1];
      for (const int number : stage.later) {
        const Stage& other = stages_[number];
        if (other.forwards_done < end) later += given_.left[number][std::max(other.forwards_done, start)];
      }
    }
    return given_.held[stage.number][stage.forwards_done] + later;
  }

  double forward(Rank& rank, Stage& stage, double now) {
    const int place = stage.forwards_done;
    const double end = now + given_.forward[stage.number][place];
    ++stage.forwards_done;
    rank.used += given_.held[stage.number][place];
    ++rank.alive;
    if (stage.number + 1 < given_.stages()) {
      Stage& target = stages_[stage.number + 1];
      deliver(stage, target, place, end, target.forwards_ready);
    } else {
      Figures& ready = stage.inputs_ready;
      while (static_cast<int>(ready.size()) < given_.units() && given_.needed[ready.size()] <= place) {
        ready.push_back(end);
      }
    }
    started(kF, rank, stage, place);
    return end;
  }

  double inputs(Rank& rank, Stage& stage, double now) {
    const int place = given_.needed[stage.inputs_done];
    const double end = now + given_.inputs[stage.number][place];
    ++stage.inputs_done;
    rank.peak = std::max(rank.peak, rank.used + given_.added[stage.number][place]);
    rank.used += given_.deferred[stage.number][place] - given_.held[stage.number][place];
    --rank.alive;
    rank.waiting.emplace_back(stage.number, place);
    if (stage.number > 0) {
      Stage& target = stages_[stage.number - 1];
      deliver(stage, target, place, end, target.inputs_ready);
    }
    started(kI, rank, stage, place);
    return end;
  }

  double weights(Rank& rank, double now) {
    const auto [stage, place] = rank.waiting.front();
    rank.waiting.pop_front();
    rank.used -= given_.deferred[stage][place];
    rank.order.push_back(code(kW, stage, place));
    return now + given_.weights[stage][place];
  }

  void started(int kind, Rank& rank, const Stage& stage, int place) {
    rank.order.push_back(code(kind, stage.number, place));
    if (!rules_.order.empty()) {
      std::size_t at = rank.choices.size();
      do {
        --at;
      } while (rank.choices[at].kind != kind || rank.choices[at].stage != stage.number);
      rank.choices.erase(rank.choices.begin() + static_cast<std::ptrdiff_t>(at));
    } else if (rules_.in_turn) {
      const auto& prefer = rules_.prefer;
      const auto at = std::find(prefer.begin(), prefer.end(), std::make_pair(kind, stage.place));
      rank.turn = (static_cast<std::size_t>(at - prefer.begin()) + 1) % prefer.size();
    }
  }

  void deliver(const Stage& source, const Stage& target, int place, double end, Figures& ready) {
    if (source.rank != target.rank) {
      double& free = link_free_[{source.rank, target.rank}];
      const double begin = std::max(end, free);
      end = free = begin + given_.message[std::min(source.number, target.number)][place];
    }
    ready.push_back(end);
    events_.emplace(end, target.rank);
  }

  Found found() {
    Found made;
    std::size_t ops = 0;
    for (const Rank& rank : ranks_) ops += rank.order.size();
    if (ops < 3 * static_cast<std::size_t>(given_.units()) * given_.homes.size()) {
      made.stuck = true;
      return made;
    }
    made.makespan = made.span = made.memory = -kNever;
    for (std::size_t number = 0; number < ranks_.size(); ++number) {
      Rank& rank = ranks_[number];
      made.makespan = std::max(made.makespan, rank.free);
      made.span = std::max(made.span, rank.free - rank.begun);
      const double limit = given_.limit[number];
      made.memory = std::max(made.memory, limit != 0.0 ? rank.peak / limit : 0.0);
      made.ranks.push_back(std::move(rank.order));
    }
    return made;
  }

  int code(int kind, int stage, int place) const { return (kind * given_.stages() + stage) * given_.units() + place; }

  const Problem& given_;
  const Rules& rules_;
  std::vector<Rank> ranks_;
  std::vector<Stage> stages_;
  std::map<std::pair<int, int>, double> link_free_;
  std::priority_queue<std::pair<double, int>, std::vector<std::pair<double, int>>, std::greater<>> events_;
};

}  // namespace

namespace helixpipe {

void bind_split_backwards(py::module_& module) {
  py::class_<Problem, std::shared_ptr<Problem>>(module, "SplitBackwards")
      .def(py::init([](Numbers homes, std::vector<Numbers> own, Numbers microbatches, Numbers starts, Numbers needed,
                       ByStage forward, ByStage inputs, ByStage weights, ByStage message, ByStage held,
                       ByStage deferred, ByStage added, ByStage left, Figures limit, Figures reserve, Figures work) {
        return std::make_shared<Problem>(Problem{
            std::move(homes), std::move(microbatches), std::move(starts), std::move(needed), std::move(own),
            std::move(forward), std::move(inputs), std::move(weights), std::move(message), std::move(held),
            std::move(deferred), std::move(added), std::move(left), std::move(limit), std::move(reserve),
            std::move(work)});
      }))
      .def("greedy",
           [](const Problem& self, std::vector<std::pair<int, int>> prefer,
              std::vector<std::vector<std::pair<int, int>>> order, int ahead, bool in_turn, bool make_room,
              Figures deferred, Figures warmup, double patience, double slowest) {
             const Rules rules{std::move(prefer), std::move(order),  ahead,   in_turn, make_room,
                               std::move(deferred), std::move(warmup), patience};
             return std::make_shared<Found>(Greedy(self, rules).run(slowest));
           });
  py::class_<Found, std::shared_ptr<Found>>(module, "SplitBackwardsFound")
      .def_readonly("stuck", &Found::stuck)
      .def_readonly("abandoned", &Found::abandoned)
      .def_readonly("makespan", &Found::makespan)
      .def_readonly("span", &Found::span)
      .def_readonly("memory", &Found::memory)
      .def_readonly("ranks", &Found::ranks);
}

}  // namespace helixpipe
