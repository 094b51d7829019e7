#include <unordered_set>

#include "core.h"

namespace helixpipe {

namespace {

// A transfer whose end no task waits for.
struct Unawaited {
  double end;
  int slack, task;
};

class Projection {
 public:
  Projection(const Graph& graph, const Times& times, const Flags& shipped, int slack)
      : graph_(graph),
        times_(times),
        shipped_(shipped),
        slack_(slack),
        returned_(graph.index().num_ranks),
        unused_(graph.transfers.size(), 0) {
    const int ranks = graph.index().num_ranks;
    streams_.actions.resize(ranks);
    streams_.tasks.resize(ranks);
    find_waits();
    for (const int number : graph.weights_of) {
      if (number >= 0) ++unused_[number];
    }
    for (const Transfer& each : graph.transfers) {
      if (each.follows >= 0 && graph.tables().rows[each.kind].passed_on) ++unused_[each.follows];
    }
  }

  Streams run(const Numbers& order) {
    for (const int task : order) {
      if (task >= graph_.num_ops()) {
        transfer(task);
        continue;
      }
      const char kind = graph_.index().kind[task];
      if (streams_.openings.empty() && (kind == kBackward || kind == kInput)) note_openings();
      op(task, kind);
    }
    for (std::size_t rank = 0; rank < returned_.size(); ++rank) {
      for (const Unawaited& each : returned_[rank]) add(static_cast<int>(rank), kWait, each.task);
    }
    if (streams_.openings.empty()) note_openings();
    return std::move(streams_);
  }

 private:
  void add(int rank, Action action, int task) {
    streams_.actions[rank].push_back(action);
    streams_.tasks[rank].push_back(task);
  }

  void note_openings() {
    for (const Numbers& each : streams_.tasks) streams_.openings.push_back(static_cast<int>(each.size()));
  }

  std::uint64_t key(int transfer, int rank) const {
    return static_cast<std::uint64_t>(transfer) * returned_.size() + rank;
  }

  bool awaited(int task, int rank) const {
    const int number = task - graph_.num_ops();
    return seen_first_[number] == rank || seen_.count(key(number, rank));
  }

  void find_waits() {
    const int num_ops = graph_.num_ops();
    seen_first_.assign(graph_.transfers.size(), -1);
    Log waits;
    for (int task = 0; task < graph_.num_tasks(); ++task) {
      const int rank = graph_.home(task);
      for (const int* at = graph_.reads.begin(task); at != graph_.reads.end(task); ++at) {
        const int writer = graph_.writer[*at];
        if (writer < num_ops || graph_.row(writer).waited != kReader || awaited(writer, rank)) continue;
        if (task >= num_ops && graph_.row(task).passed_on) continue;
        int& first = seen_first_[writer - num_ops];
        if (first < 0) {
          first = rank;
        } else {
          seen_.insert(key(writer - num_ops, rank));
        }
        waits.add(task, writer);
      }
    }
    waits_ = waits.lists(graph_.num_tasks());
  }

  void wait_before(int task, int rank) {
    for (const int* at = waits_.begin(task); at != waits_.end(task); ++at) add(rank, kWait, *at);
  }

  void op(int task, char kind) {
    const int rank = graph_.index().rank[task];
    if (!returned_[rank].empty()) take_in(rank, times_.start[task]);
    wait_before(task, rank);
    add(rank, kRun, task);
    if (kind == kBackward || kind == kWeight) add(rank, kFree, task);
    if (graph_.weights_of[task] >= 0) use(graph_.weights_of[task]);
  }

  void transfer(int task) {
    const Transfer& own = graph_.transfers[task - graph_.num_ops()];
    const TransferRow& row = graph_.tables().rows[own.kind];
    const Numbers& ranks = graph_.ranks(task);
    const bool link = row.resource == kLink;
    wait_before(task, ranks[0]);
    for (std::size_t at = 0; at < ranks.size(); ++at) {
      add(ranks[at], !link ? kStart : at == 0 ? kSend : kReceive, task);
    }
    if (row.waited == kEnded || row.waited == kReader) {
      const int slack = link && shipped_[own.stage] ? slack_ : 0;
      for (std::size_t at = link ? 1 : 0; at < ranks.size(); ++at) {
        if (!awaited(task, ranks[at])) returned_[ranks[at]].push_back({times_.end[task], slack, task});
      }
    }
    if (own.follows >= 0 && row.passed_on) use(own.follows);
  }

  void take_in(int rank, double start) {
    std::vector<Unawaited> left;
    for (Unawaited& each : returned_[rank]) {
      if (each.end > start) {
        left.push_back(each);
      } else if (each.slack > 0) {
        --each.slack;
        left.push_back(each);
      } else {
        add(rank, kWait, each.task);
      }
    }
    returned_[rank] = std::move(left);
  }

  void use(int number) {
    const int task = graph_.num_ops() + number;
    if (--unused_[number] == 0) add(graph_.ranks(task).back(), kFree, task);
  }

  const Graph& graph_;
  const Times& times_;
  const Flags& shipped_;
  int slack_;
  Streams streams_;
  std::vector<std::vector<Unawaited>> returned_;
  Numbers unused_, seen_first_;
  std::unordered_set<std::uint64_t> seen_;
  Lists waits_;
};

}  // namespace

Streams project(const Graph& graph, const Times& times, const Numbers& order, const Flags& shipped, int slack) {
  return Projection(graph, times, shipped, slack).run(order);
}

// As streams.transfer_orders and streams.stream_waits.
Given given_by_streams(const Graph& graph, const Streams& streams, const Numbers& order) {
  const int num_ops = graph.num_ops();
  Given given;
  given.orders.resize(graph.num_resources());
  given.in_order.assign(graph.num_resources(), 0);
  for (const int task : order) {
    if (task < num_ops) continue;
    const int number = graph.resource(task);
    given.orders[number].push_back(task);
    if (graph.row(task).waited != kStep) given.in_order[number] = 1;
  }
  for (int number = 0; number < graph.num_resources(); ++number) {
    if (!given.in_order[number]) given.orders[number].clear();
  }
  Flags unread(graph.num_tasks(), 0);
  bool any = false;
  for (int task = num_ops; task < graph.num_tasks(); ++task) {
    unread[task] = graph.row(task).waited != kUsers && graph.row(task).waited != kStep;
  }
  for (int task = 0; task < num_ops; ++task) {
    for (const int* at = graph.reads.begin(task); at != graph.reads.end(task); ++at) unread[graph.writer[*at]] = 0;
  }
  for (int task = num_ops; task < graph.num_tasks(); ++task) any = any || unread[task];
  Log waits;
  for (std::size_t rank = 0; any && rank < streams.tasks.size(); ++rank) {
    Numbers waited;
    for (std::size_t at = 0; at < streams.tasks[rank].size(); ++at) {
      const int task = streams.tasks[rank][at];
      if (streams.actions[rank][at] == kWait && unread[task]) {
        waited.push_back(task);
      } else if (streams.actions[rank][at] == kRun) {
        for (const int before : waited) waits.add(before, task);
        waited.clear();
      }
    }
  }
  given.waits = waits.lists(graph.num_tasks());
  return given;
}

}  // namespace helixpipe
