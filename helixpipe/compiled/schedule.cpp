#include <algorithm>
#include <functional>
#include <limits>

#include "core.h"

namespace helixpipe {

double Times::makespan() const {
  double last = 0.0;
  bool any = false;
  for (const double each : end) {
    if (!any || each > last) last = each;
    any = true;
  }
  return last;
}

namespace {

using Completion = std::tuple<double, long, int>;  // end, turn, task

class EarliestStarts {
 public:
  EarliestStarts(const Graph& graph, const Figures& durations, const Given* given)
      : graph_(graph),
        durations_(durations),
        given_(given),
        num_ops_(graph.num_ops()),
        queues_(graph.num_resources()),
        next_(graph.num_resources(), 0),
        busy_(graph.num_resources(), 0),
        freed_(graph.num_resources(), -std::numeric_limits<double>::infinity()),
        waiting_(graph.waiting) {
    const Index& index = graph.index();
    const int tasks = graph.num_tasks();
    resource_.resize(tasks);
    for (int task = 0; task < tasks; ++task) resource_[task] = graph.resource(task);
    for (int rank = 0; rank < index.num_ranks; ++rank) {
      for (int task = index.first[rank]; task < index.first[rank + 1]; ++task) queues_[rank].push_back(task);
    }
    for (int number = index.num_ranks; given && number < graph.num_resources(); ++number) {
      queues_[number] = given->orders[number];
    }
    if (given) {
      for (const int task : given->waits.items) ++waiting_[task];
    }
    for (int task = 0; task < num_ops_; ++task) longest_ = task ? std::max(longest_, durations[task]) : durations[task];
    times_.start.assign(tasks, 0.0);
    times_.end.assign(tasks, 0.0);
    times_.order.reserve(tasks);
  }

  Times run() {
    const int tasks = graph_.num_tasks();
    for (int task = num_ops_; task < tasks; ++task) {
      if (waiting_[task] == 0) queue(task);
    }
    for (int number = 0; number < graph_.num_resources(); ++number) try_start(number, 0.0);
    while (!heap_.empty()) {
      std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
      const auto [now, turn, task] = heap_.back();
      heap_.pop_back();
      if (task < num_ops_) times_.order.push_back(task);
      release(graph_.successors, task, now);
      if (given_) release(given_->waits, task, now);
      const int number = resource_[task];
      busy_[number] = 0;
      freed_[number] = now;
      try_start(number, now);
    }
    return std::move(times_);
  }

 private:
  void queue(int task) {
    const int number = resource_[task];
    if (!given_ || !given_->in_order[number]) queues_[number].push_back(task);
  }

  void release(const Lists& after, int task, double now) {
    for (const int* at = after.begin(task); at != after.end(task); ++at) {
      if (--waiting_[*at] == 0) {
        if (*at >= num_ops_) queue(*at);
        try_start(resource_[*at], now);
      }
    }
  }

  void try_start(int number, double now) {
    const Numbers& queue = queues_[number];
    if (busy_[number] || next_[number] == static_cast<int>(queue.size()) || waiting_[queue[next_[number]]]) return;
    const int task = queue[next_[number]++];
    busy_[number] = 1;
    const double end = now + durations_[task];
    times_.start[task] = now;
    times_.end[task] = end;
    long turn = ++started_;
    if (task < num_ops_) {
      turn += static_cast<long>(times_.start.size());  // of tasks that end at one time transfers come before ops
    } else {
      times_.order.push_back(task);
      if (now - freed_[number] < longest_) times_.crowded.emplace_back(task, freed_[number]);
    }
    heap_.emplace_back(end, turn, task);
    std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
  }

  const Graph& graph_;
  const Figures& durations_;
  const Given* given_;
  int num_ops_;
  std::vector<Numbers> queues_;
  Numbers next_;
  Flags busy_;
  Figures freed_;
  Numbers waiting_, resource_;
  double longest_ = 0.0;
  long started_ = 0;
  std::vector<Completion> heap_;
  Times times_;
};

}  // namespace

Times list_schedule(const Graph& graph, const Figures& durations, const Given* given) {
  return EarliestStarts(graph, durations, given).run();
}

}  // namespace helixpipe
