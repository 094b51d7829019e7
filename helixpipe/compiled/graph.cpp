// The graph of a program, and the two passes that add most of it; the other passes are Python's and call the same
// functions.

#include <algorithm>

#include "core.h"

namespace helixpipe {

Graph::Graph(std::shared_ptr<const Index> index, std::shared_ptr<const Tables> tables, Likeness alike,
             bool forward_only)
    : index_(std::move(index)), tables_(std::move(tables)), alike_(std::move(alike)), forward_only_(forward_only) {
  const int ops = num_ops();
  takes.assign(ops, -1);
  gives.assign(ops, -1);
  saved.assign(ops, -1);
  weights_of.assign(ops, -1);
  sum_of.assign(ops, -1);
  recomputes.assign(ops, 0);
  count.assign(tables_->rows.size(), 0);
  waiting.assign(ops, 0);
  for (int rank = 0; rank < index_->num_ranks; ++rank) {
    resource_ranks.push_back({rank});
    resource_kinds.push_back(kCompute);
  }
}

void Graph::wait(int task, int before) {
  if (task < 0 || before < 0 || task >= num_tasks() || before >= num_tasks()) {
    throw Incomplete("an op that others wait for is missing");
  }
  edges_.add(before, task);
  ++waiting[task];
}

int Graph::buffer(const Buffer& made, int written_by, int reader, int freed_by) {
  if (written_by < 0) throw Incomplete("an op that others wait for is missing");
  const int number = static_cast<int>(buffers.size());
  buffers.push_back(made);
  writer.push_back(written_by);
  writes_.add(written_by, number);
  if (reader >= 0) read(reader, number);
  if (freed_by >= 0) frees_made.add(freed_by, number);
  return number;
}

void Graph::read(int task, int number) {
  reads_made.add(task, number);
  wait(task, writer[number]);
}

int Graph::transfer(int kind, const Numbers& ranks, int stage, int microbatch, int chunk, int producer, int consumer,
                    const Numbers& taken, int follows) {
  const int resource_kind = tables_->rows[kind].resource;
  const auto [at, is_new] = resource_numbers_.try_emplace({resource_kind, ranks}, num_resources());
  if (is_new) {
    resource_ranks.push_back(ranks);
    resource_kinds.push_back(resource_kind);
  }
  transfers.push_back({kind, at->second, stage, microbatch, chunk, producer, consumer, follows});
  waiting.push_back(0);
  ++count[kind];
  const int task = num_tasks() - 1;
  for (const int number : taken) {
    frees_made.add(task, number);
    read(task, number);
  }
  return task;
}

// As passes/activations.py.
void Graph::activations(int chain) {
  const Index& own = *index_;
  const Numbers& forward = own.tasks[kForward];
  const auto cross = [&](int buffer_kind, int transfer_kind, int producer, int consumer) {
    if (producer < 0) throw Incomplete("an op that others wait for is missing");
    const int source = own.rank[producer], target = own.rank[consumer];
    const int stage = own.stage[consumer], microbatch = own.microbatch[consumer], chunk = own.chunk[consumer];
    const Buffer there{buffer_kind, target, stage, microbatch, chunk, false};
    if (source == target) {
      gives[producer] = takes[consumer] = buffer(there, producer, consumer, consumer);
      return;
    }
    Buffer left = there;
    left.rank = source;
    const int here = gives[producer] = buffer(left, producer);
    const int message =
        transfer(transfer_kind, {source, target}, stage, microbatch, chunk, producer, consumer, {here}, -1);
    takes[consumer] = buffer(there, message, consumer, consumer);
  };
  const auto of_unit = [&](int kind, int task) {
    return Buffer{kind, own.rank[task], own.stage[task], own.microbatch[task], own.chunk[task], false};
  };
  for (int task = 0; task < num_ops(); ++task) {
    const int stage = own.stage[task], unit = own.unit[task];
    switch (own.kind[task]) {
      case kForward:
        if (0 < stage && stage < chain) {
          cross(tables_->activation, tables_->activation_sent, forward[unit - own.per_stage], task);
        }
        break;
      case kWeight:
        buffer(of_unit(tables_->deferred, task), own.backward(unit), task, task);
        break;
      case kBackward:
      case kInput: {
        const int recompute = own.tasks[kRecompute][unit];
        const int number =
            buffer(of_unit(tables_->saved, task), forward[unit], recompute >= 0 ? recompute : task, task);
        saved[forward[unit]] = saved[task] = number;
        if (recompute >= 0) {
          saved[recompute] = number;
          buffer(of_unit(tables_->recomputed, task), recompute, task, task);
        } else if (alike_.recompute[alike_.activations[unit]]) {
          recomputes[task] = 1;
          buffer(of_unit(tables_->recomputed, task), task, -1, task);
        }
        if (stage < chain - 1) {
          cross(tables_->gradient, tables_->gradient_sent, own.backward(unit + own.per_stage), task);
        }
        break;
      }
      default:
        break;
    }
  }
}

// As passes/keys_values.py, of a stage with attention whose rows each run on one rank.
void Graph::keys_values(int stage, const std::vector<Numbers>& rows, bool blocks) {
  const Index& own = *index_;
  for (const Numbers& places : rows) {
    Numbers forwards, backwards;  // in the row's order
    for (const int place : places) {
      const int unit = stage * own.per_stage + place;
      forwards.push_back(own.tasks[kForward][unit]);
      if (!forward_only_) backwards.push_back(own.backward(unit));
    }
    const int chunks = static_cast<int>(places.size()), rank = own.rank[forwards[0]];
    for (int at = 1; at < chunks; ++at) wait(forwards[at], forwards[at - 1]);
    const auto back = [&] {
      for (int at = chunks - 1; at > 0 && !forward_only_; --at) wait(backwards[at - 1], backwards[at]);
    };
    if (!blocks) {
      const int row = own.microbatch[forwards[0]];
      buffer({tables_->keys_values, rank, stage, row, -1, false}, forwards[0], -1,
             forward_only_ ? forwards.back() : backwards[0]);
      back();
      if (!forward_only_) {
        buffer({tables_->kv_gradients, rank, stage, row, -1, false}, backwards.back(), -1, backwards[0]);
      }
      continue;
    }
    for (int at = 0; at + 1 < chunks && !forward_only_; ++at) wait(backwards[at], backwards[at + 1]);
    for (int at = 0; at < chunks; ++at) {
      const int microbatch = own.microbatch[forwards[at]], chunk = own.chunk[forwards[at]];
      Buffer block{tables_->keys_values, rank, stage, microbatch, chunk, false};
      buffer(block, forwards[at], -1, forward_only_ ? forwards.back() : backwards[at]);
      if (!forward_only_ && at + 1 < chunks) {
        block.kind = tables_->kv_gradients;
        buffer(block, backwards.back(), -1, backwards[at]);
      }
    }
  }
}

void Graph::finish() {
  const int tasks = num_tasks();
  successors = edges_.lists(tasks);
  writes = writes_.lists(tasks);
  reads = reads_made.lists(tasks);
  frees = frees_made.lists(tasks);
  edges_ = writes_ = reads_made = frees_made = Log();
}

// Which buffers are of one size, as BoundCosts._likeness.
std::uint64_t Graph::likeness(int kind, int stage, int microbatch, int chunk, const Alike* classes) const {
  const int unlike = tables_->of_weights[kind] || classes == nullptr ? stage : classes->stages.at(stage);
  const auto key = [&](std::uint64_t extents, std::uint64_t activations, bool inside) {
    if (extents >> 20 || activations >> 18 || stage >> 16) throw std::invalid_argument("too many kinds of work");
    return (((static_cast<std::uint64_t>(kind) << 16 | unlike) << 20 | extents) << 18 | activations) << 1 | inside;
  };
  if (tables_->of_weights[kind]) return key(0, 0, false);
  if (chunk < 0) return key(alike_.rows[microbatch], 0, false);
  const int unit = index_->unit_of(stage, microbatch, chunk);
  const bool differs = kind == tables_->recomputed || kind == tables_->workspace;
  const bool inside = differs && index_->tasks[kRecompute][unit] < 0;
  return key(alike_.extents[unit % index_->per_stage], alike_.activations[unit], inside);
}

namespace {

// Numbers groups by a key as they are first met.
template <typename Key>
class Grouping {
 public:
  explicit Grouping(int items) { made_.of.reserve(items); }
  void add(Key key) {
    const auto [at, is_new] = numbers_.try_emplace(key, static_cast<int>(numbers_.size()));
    if (is_new) made_.first.push_back(static_cast<int>(made_.of.size()));
    made_.of.push_back(at->second);
  }
  void skip() { made_.of.push_back(-1); }
  Groups take() { return std::move(made_); }

 private:
  std::map<Key, int> numbers_;
  Groups made_;
};

// The groups of items that have a key in common, with the items themselves as their first ones.
template <typename Key, typename Asked>
Groups samples(const Numbers& items, Asked key) {
  Grouping<Key> groups(static_cast<int>(items.size()));
  for (const int item : items) groups.add(key(item));
  Groups made = groups.take();
  for (int& first : made.first) first = items[first];
  return made;
}

}  // namespace

Graph::TaskKey Graph::task_key(int task, const Alike* classes) const {
  if (task >= num_ops()) {
    const Transfer& own = transfers[task - num_ops()];
    const TransferRow& row = tables_->rows[own.kind];
    const auto moved = likeness(row.moves, own.stage, own.microbatch, own.chunk, classes);
    const int link = row.resource != kLink ? 0 : classes == nullptr ? own.resource : classes->resources.at(own.resource);
    return {moved, link * static_cast<int>(tables_->rows.size()) + own.kind};  // ops have negative second parts
  }
  const Index& own = *index_;
  const Numbers& forwards = own.tasks[kForward];
  const int unit = own.unit[task], activations = alike_.activations[unit], kind = own.kind[task];
  // Whether the unit is on another rank, as BoundCosts._crossing.
  const auto elsewhere = [&](int other) {
    const bool there = other >= 0 && other < static_cast<int>(forwards.size()) && forwards[other] >= 0;
    return !there || own.rank[forwards[other]] != own.rank[task];
  };
  const bool backward = kind == kBackward || kind == kInput;
  const bool inside = backward && alike_.recompute[activations] && own.tasks[kRecompute][unit] < 0;
  const auto extents = static_cast<std::uint64_t>(alike_.extents[unit % own.per_stage]);
  const int work_kind = kind << 2 | elsewhere(unit - own.per_stage) << 1 | elsewhere(unit + own.per_stage);
  const int stage = classes == nullptr ? own.stage[task] : classes->stages.at(own.stage[task]);
  const std::uint64_t work = (static_cast<std::uint64_t>(work_kind) << 16 | stage) << 32 | extents;
  return {work, -1 - (2 * activations + (inside ? 1 : 0))};
}

Graph::TaskKey Graph::workspace_key(int task, const Alike* classes) const {
  const Index& own = *index_;
  const int kind = tables_->workspace;
  return {likeness(kind, own.stage[task], own.microbatch[task], own.chunk[task], classes), own.kind[task]};
}

std::uint64_t Graph::size_key(int number, const Alike* classes) const {
  const Buffer& own = buffers[number];
  return likeness(own.kind, own.stage, own.microbatch, own.chunk, classes);
}

const Groups& Graph::tasks_alike() const {
  if (!tasks_.of.empty()) return tasks_;
  Grouping<TaskKey> groups(num_tasks());
  for (int task = 0; task < num_tasks(); ++task) {
    if (task >= num_ops() && tables_->rows[transfers[task - num_ops()].kind].waited == kStep) {
      groups.skip();
    } else {
      groups.add(task_key(task, nullptr));
    }
  }
  return tasks_ = groups.take();
}

const Groups& Graph::sizes_alike() const {
  if (!sizes_.of.empty()) return sizes_;
  Grouping<std::uint64_t> groups(static_cast<int>(buffers.size()));
  for (int number = 0; number < static_cast<int>(buffers.size()); ++number) groups.add(size_key(number, nullptr));
  return sizes_ = groups.take();
}

const Groups& Graph::workspaces_alike() const {
  if (!workspaces_.of.empty()) return workspaces_;
  Grouping<TaskKey> groups(num_ops());
  for (int task = 0; task < num_ops(); ++task) groups.add(workspace_key(task, nullptr));
  return workspaces_ = groups.take();
}

Groups Graph::samples_of_tasks(const Alike& classes) const {
  return samples<TaskKey>(tasks_alike().first, [&](int task) { return task_key(task, &classes); });
}

Groups Graph::samples_of_sizes(const Alike& classes) const {
  return samples<std::uint64_t>(sizes_alike().first, [&](int number) { return size_key(number, &classes); });
}

Groups Graph::samples_of_workspaces(const Alike& classes) const {
  return samples<TaskKey>(workspaces_alike().first, [&](int task) { return workspace_key(task, &classes); });
}

bool Graph::against_own_order() const {
  for (int task = 0; task < num_ops(); ++task) {
    for (const int* at = successors.begin(task); at != successors.end(task); ++at) {
      if (*at < task && index_->rank[*at] == index_->rank[task]) return true;
    }
  }
  return false;
}

int Graph::ended() const {
  Numbers left = waiting, ready;
  Flags is_last(num_tasks(), 0);
  for (int rank = 0; rank < index_->num_ranks; ++rank) {
    const int begin = index_->first[rank], end = index_->first[rank + 1];
    for (int task = begin + 1; task < end; ++task) ++left[task];
    if (end > begin) is_last[end - 1] = 1;
  }
  for (int task = 0; task < num_tasks(); ++task) {
    if (left[task] == 0) ready.push_back(task);
  }
  for (std::size_t at = 0; at < ready.size(); ++at) {
    const int task = ready[at];
    const auto done = [&](int successor) {
      if (--left[successor] == 0) ready.push_back(successor);
    };
    for (const int* next = successors.begin(task); next != successors.end(task); ++next) done(*next);
    if (task < num_ops() && !is_last[task]) done(task + 1);
  }
  return static_cast<int>(ready.size());
}

Numbers Graph::unit_order() const {
  const Lists after = edges_.lists(num_tasks());
  Numbers left = waiting, order;
  std::vector<Numbers> queues(num_resources());
  Numbers next(num_resources(), 0), running, instant;
  Flags busy(num_resources(), 0);
  for (int rank = 0; rank < index_->num_ranks; ++rank) {
    for (int task = index_->first[rank]; task < index_->first[rank + 1]; ++task) queues[rank].push_back(task);
  }
  const auto try_start = [&](int number) {
    const Numbers& queue = queues[number];
    if (busy[number] || next[number] == static_cast<int>(queue.size()) || left[queue[next[number]]]) return;
    busy[number] = 1;
    const int task = queue[next[number]++];
    (task < num_ops() ? running : instant).push_back(task);
  };
  for (int task = num_ops(); task < num_tasks(); ++task) {
    if (left[task] == 0) queues[resource(task)].push_back(task);
  }
  for (int number = 0; number < num_resources(); ++number) try_start(number);
  std::size_t ran = 0, moved = 0;
  while (moved < instant.size() || ran < running.size()) {
    const int task = moved < instant.size() ? instant[moved++] : running[ran++];
    if (task < num_ops()) order.push_back(task);
    for (const int* at = after.begin(task); at != after.end(task); ++at) {
      if (--left[*at] == 0) {
        if (*at >= num_ops()) queues[resource(*at)].push_back(*at);
        try_start(resource(*at));
      }
    }
    busy[resource(task)] = 0;
    try_start(resource(task));
  }
  return order;
}

}  // namespace helixpipe
