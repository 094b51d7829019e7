#include <algorithm>
#include <functional>
#include <limits>

#include "core.h"

namespace helixpipe {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

using Pairs = std::vector<std::pair<int, int>>;  // an op, and the transfer that is to be behind it

// The last op of a rank that began before a time; -1 where there is none.
int begun(const Graph& graph, const Times& times, int rank, double time) {
  int low = graph.index().first[rank], high = graph.index().first[rank + 1];
  const int first = low;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (times.start[middle] < time) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low > first ? low - 1 : -1;
}

Pairs late_sums(const Graph& graph, const Times& times) {
  Pairs late;
  const int kind = graph.tables().weight_gradients_sent;
  for (int task = graph.num_ops(); task < graph.num_tasks(); ++task) {
    const Transfer& total = graph.transfers[task - graph.num_ops()];
    if (total.kind != kind || total.follows < 0) continue;
    const double start = times.start[task], came = times.end[graph.num_ops() + total.follows];
    const int op = begun(graph, times, graph.ranks(task)[0], start);
    if (op < 0) continue;
    const double left = times.end[op] - start;
    if (came - times.start[op] >= left && left > 0) late.emplace_back(op, task);
  }
  return late;
}

Pairs held(const Graph& graph, const Times& times) {
  Numbers place(graph.num_tasks(), 0);
  for (std::size_t at = 0; at < times.order.size(); ++at) place[times.order[at]] = static_cast<int>(at);
  Pairs found;
  for (const auto& [task, free] : times.crowded) {
    for (const int rank : graph.ranks(task)) {
      const int op = begun(graph, times, rank, times.start[task]);
      if (op >= 0 && times.start[op] < free && place[op] > place[task]) found.emplace_back(op, task);
    }
  }
  return found;
}

// How much later each transfer may end without any op starting later.
Figures slack(const Graph& graph, const Times& times) {
  Figures room(graph.num_tasks(), 0.0);
  Numbers following(graph.num_resources(), -1);
  for (auto at = times.order.rbegin(); at != times.order.rend(); ++at) {
    const int task = *at;
    if (task < graph.num_ops()) continue;
    const double end = times.end[task];
    double least = kNever;
    for (const int* after = graph.successors.begin(task); after != graph.successors.end(task); ++after) {
      least = std::min(least, times.start[*after] - end + room[*after]);
    }
    int& next = following[graph.resource(task)];
    if (next >= 0) least = std::min(least, times.start[next] - end + room[next]);
    room[task] = least;
    next = task;
  }
  return room;
}

Numbers sorted(const Graph& graph, const Times& times, const Pairs& behind) {
  Log added;
  Numbers left = graph.waiting;
  const auto add = [&](int before, int task) {
    added.add(before, task);
    ++left[task];
  };
  for (const auto& [op, task] : behind) add(op, task);
  Numbers last(graph.num_resources(), -1);
  for (const int task : times.order) {
    int& before = last[graph.resource(task)];
    if (before >= 0) add(before, task);
    before = task;
  }
  const Lists more = added.lists(graph.num_tasks());
  using Key = std::tuple<double, int, int>;  // time, whether it is an op, place
  std::vector<Key> keys(graph.num_tasks()), ready;
  for (std::size_t at = 0; at < times.order.size(); ++at) {
    const int task = times.order[at];
    const bool is_op = task < graph.num_ops();
    keys[task] = {is_op ? times.end[task] : times.start[task], is_op, static_cast<int>(at)};
    if (left[task] == 0) ready.push_back(keys[task]);
  }
  std::make_heap(ready.begin(), ready.end(), std::greater<>());
  Numbers order;
  order.reserve(times.order.size());
  while (!ready.empty()) {
    std::pop_heap(ready.begin(), ready.end(), std::greater<>());
    const int task = times.order[std::get<2>(ready.back())];
    ready.pop_back();
    order.push_back(task);
    for (const Lists* lists : {&graph.successors, &more}) {
      for (const int* after = lists->begin(task); after != lists->end(task); ++after) {
        if (--left[*after] == 0) {
          ready.push_back(keys[*after]);
          std::push_heap(ready.begin(), ready.end(), std::greater<>());
        }
      }
    }
  }
  return order;
}

}  // namespace

Numbers without_holds(const Graph& graph, const Times& times, bool rings) {
  Pairs behind;
  if (rings) {
    behind = late_sums(graph, times);
  } else if (!times.crowded.empty()) {
    const Pairs found = held(graph, times);
    const Figures room = found.empty() ? Figures() : slack(graph, times);
    for (const auto& [op, task] : found) {
      if (times.end[op] - times.start[task] <= room[task]) behind.emplace_back(op, task);
    }
  }
  return behind.empty() ? times.order : sorted(graph, times, behind);
}

}  // namespace helixpipe
