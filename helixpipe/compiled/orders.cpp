// The twin of Evaluator in planning/reorder/evaluate.py, where everything is explained: the same sums in the same order.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using Numbers = std::vector<int>;
using Figures = std::vector<double>;
using Completion = std::tuple<double, long, int>;  // end, turn, task

constexpr double kMargin = 1 + 1e-9;
constexpr double kNever = std::numeric_limits<double>::infinity();

class Evaluator {
 public:
  Evaluator(int num_ranks, int num_resources, Figures durations, Numbers resources, Numbers first_successor,
            Numbers successors, Numbers waiting, Figures held, Figures rise, Figures change, Numbers taken_on,
            Figures taken, Numbers sent_from, Figures sent, Figures limits)
      : num_ranks_(num_ranks),
        num_resources_(num_resources),
        num_ops_(static_cast<int>(rise.size())),
        durations_(std::move(durations)),
        resources_(std::move(resources)),
        first_successor_(std::move(first_successor)),
        successors_(std::move(successors)),
        given_waiting_(std::move(waiting)),
        held_(std::move(held)),
        rise_(std::move(rise)),
        change_(std::move(change)),
        taken_on_(std::move(taken_on)),
        taken_(std::move(taken)),
        sent_from_(std::move(sent_from)),
        sent_(std::move(sent)),
        limits_(std::move(limits)),
        queues_(num_resources),
        starts_(durations_.size()),
        ends_(durations_.size()),
        peaks_(held_),
        kept_starts_(starts_),
        kept_ends_(ends_),
        kept_peaks_(peaks_) {}

  double Makespan(const std::vector<Numbers>& orders, double bound) {
    bound_ = bound;
    Reset(orders);
    const int num_tasks = static_cast<int>(durations_.size());
    for (int task = num_ops_; task < num_tasks; ++task) {
      if (waiting_[task] == 0) queues_[resources_[task]].push_back(task);
    }
    for (int number = 0; number < num_resources_; ++number) TryStart(number, 0.0);
    double last = 0.0;
    int ended = 0;
    while (!heap_.empty() && !failed_) {
      std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
      const auto [end, turn, task] = heap_.back();
      heap_.pop_back();
      last = end;
      ++ended;
      if (task < num_ops_) HasRun(task);
      for (int at = first_successor_[task]; at < first_successor_[task + 1]; ++at) {
        const int successor = successors_[at];
        if (--waiting_[successor] == 0) {
          if (successor >= num_ops_) queues_[resources_[successor]].push_back(successor);
          TryStart(resources_[successor], last);
        }
      }
      busy_[resources_[task]] = 0;
      TryStart(resources_[task], last);
    }
    if (failed_ || ended < num_tasks || last > bound_) return kNever;
    kept_starts_.swap(starts_);
    kept_ends_.swap(ends_);
    kept_peaks_.swap(peaks_);
    return last;
  }

  const Figures& starts() const { return kept_starts_; }
  const Figures& ends() const { return kept_ends_; }
  const Figures& peaks() const { return kept_peaks_; }

 private:
  void Reset(const std::vector<Numbers>& orders) {
    for (int number = 0; number < num_resources_; ++number) {
      if (number < num_ranks_) {
        queues_[number] = orders[number];
      } else {
        queues_[number].clear();
      }
    }
    next_.assign(num_resources_, 0);
    busy_.assign(num_resources_, 0);
    waiting_ = given_waiting_;
    now_ = held_;
    peaks_ = held_;
    left_.assign(num_ranks_, 0.0);
    for (int rank = 0; rank < num_ranks_; ++rank) {
      for (const int task : queues_[rank]) left_[rank] += durations_[task];
    }
    heap_.clear();
    started_ = 0;
    failed_ = false;
  }

  void TryStart(int number, double now) {
    const Numbers& queue = queues_[number];
    const int place = next_[number];
    if (place == static_cast<int>(queue.size()) || busy_[number] || waiting_[queue[place]] != 0) return;
    const int task = queue[place];
    next_[number] = place + 1;
    busy_[number] = 1;
    long turn = ++started_;
    const double duration = durations_[task];
    starts_[task] = now;
    ends_[task] = now + duration;
    if (task < num_ops_) {
      turn += static_cast<long>(durations_.size());
      if (now + left_[number] > bound_ * kMargin) failed_ = true;
      left_[number] -= duration;
    } else {
      const int transfer = task - num_ops_;
      Takes(taken_on_[transfer], taken_[transfer]);
      Takes(sent_from_[transfer], sent_[transfer]);
    }
    heap_.emplace_back(now + duration, turn, task);
    std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
  }

  void Takes(int rank, double size) {
    if (rank < 0) return;
    now_[rank] += size;
    Has(rank, now_[rank]);
  }

  void HasRun(int task) {
    const int rank = resources_[task];
    Has(rank, now_[rank] + rise_[task]);
    now_[rank] += change_[task];
  }

  void Has(int rank, double size) {
    if (size > peaks_[rank]) {
      peaks_[rank] = size;
      if (size > limits_[rank]) failed_ = true;
    }
  }

  const int num_ranks_, num_resources_, num_ops_;
  const Figures durations_;
  const Numbers resources_, first_successor_, successors_, given_waiting_;
  const Figures held_, rise_, change_;
  const Numbers taken_on_;
  const Figures taken_;
  const Numbers sent_from_;
  const Figures sent_, limits_;

  std::vector<Numbers> queues_;
  Numbers next_, busy_, waiting_;
  Figures starts_, ends_, peaks_, now_, left_;
  Figures kept_starts_, kept_ends_, kept_peaks_;
  std::vector<Completion> heap_;
  double bound_ = kNever;
  long started_ = 0;
  bool failed_ = false;
};

}  // namespace

namespace helixpipe {

void bind_orders(pybind11::module_& module) {
  pybind11::class_<Evaluator>(module, "Evaluator")
      .def(pybind11::init<int, int, Figures, Numbers, Numbers, Numbers, Numbers, Figures, Figures, Figures, Numbers,
                          Figures, Numbers, Figures, Figures>())
      .def("makespan", &Evaluator::Makespan)
      .def_property_readonly("starts", &Evaluator::starts)
      .def_property_readonly("ends", &Evaluator::ends)
      .def_property_readonly("peaks", &Evaluator::peaks);
}

}  // namespace helixpipe
