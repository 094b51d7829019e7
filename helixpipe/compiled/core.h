// Data of the compiled core: a program's ops, its graph, when its tasks run, and the ranks' streams, all as flat arrays.
//
// Everything here is a twin of Python code that explains it, and does the same sums in the same order: `index` of
// lowering/index.py and validate.py, `graph` of lowering/graph.py and two of its passes, `schedule` of lowering/order.py,
// `places` of lowering/places.py, `project` of lowering/project.py and simulate/streams.py, `sweep` of simulate/sweep.py.

#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace helixpipe {

using Numbers = std::vector<int>;
using Figures = std::vector<double>;
using Flags = std::vector<char>;

// Thrown where a program lacks an op that others wait for.
struct Incomplete : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A list of numbers for each of many keys, one after another.
struct Lists {
  Numbers first{0};  // where the list of each key begins, and where the last one ends
  Numbers items;

  const int* begin(int key) const { return items.data() + first[key]; }
  const int* end(int key) const { return items.data() + first[key + 1]; }
};

// What is appended to lists in any order of their keys.
class Log {
 public:
  void add(int key, int value) {
    keys_.push_back(key);
    values_.push_back(value);
  }
  Lists lists(int keys) const;  // each in the order of its appends

 private:
  Numbers keys_, values_;
};

enum OpKind : char { kForward, kBackward, kInput, kWeight, kRecompute, kOpKinds };  // of program.OP_KINDS
enum ResourceKind { kCompute, kLink, kCollective, kCopyOut, kCopyIn };
enum Waited { kReader, kEnded, kUsers, kStep };  // of transfer.Waited

// A row of transfer.TRANSFER_KINDS.
struct TransferRow {
  std::string name;
  int resource, moves, waited;
  bool passed_on, beside_ops;
};

// The kinds of buffers (tasks.BUFFER_KINDS) and of transfers. Raises std::invalid_argument where one is missing.
struct Tables {
  Tables(std::vector<std::string> buffer_kinds, std::vector<TransferRow> rows, Flags of_weights);

  std::vector<std::string> buffer_kinds;
  std::vector<TransferRow> rows;
  Flags of_weights;
  int activation, gradient, saved, recomputed, deferred, offloaded, fetched, keys_values, kv_gradients, workspace;
  int activation_sent, gradient_sent, weight_gradients_sent;

  int buffer_kind(const std::string& name) const;
  int transfer_kind(const std::string& name) const;
};

// The ops of a program as tasks, rank by rank, and where those of each unit are.
struct Index {
  int num_ranks = 0, num_stages = 0, per_stage = 0;
  Numbers offsets;  // of each microbatch, the number of its first chunk among all
  Numbers first;    // of each rank its first task, and the end of the last one's
  std::vector<char> kind;
  Numbers rank, stage, microbatch, chunk, unit;
  std::array<Numbers, kOpKinds> tasks;  // of each kind, the task of each unit; -1 where there is none
  bool twice = false;                   // whether an op is there twice

  int num_ops() const { return static_cast<int>(kind.size()); }
  int unit_of(int stage, int microbatch, int chunk) const {
    return stage * per_stage + offsets[microbatch] + chunk;
  }
  int backward(int unit) const { return tasks[kInput][unit] >= 0 ? tasks[kInput][unit] : tasks[kBackward][unit]; }

  // Whether each unit has the ops that validate.py asks for, and all on the rank of its forward.
  bool whole_units(bool forward_only, const Flags& recomputes) const;
  // Whether all units of a stage run on one rank; or those of each row, numbers of (microbatch, chunk) pairs.
  bool together(int stage) const;
  bool together(int stage, const std::vector<Numbers>& rows) const;
};

// What of a program its tasks' costs depend on. Extents and activations are known by the number of those that are equal.
struct Likeness {
  Numbers extents;      // of each chunk of each microbatch
  Numbers rows;         // of each microbatch whose row has keys and values; 0 for others
  Numbers activations;  // of each unit
  Flags recompute;      // whether activations of that number recompute anything
};

// The first stage with equal work of each stage, and the first resource with equal links of each resource, to costs.
struct Alike {
  Numbers stages, resources;
};

struct Buffer {
  int kind, rank, stage, microbatch, chunk;
  bool host;
};

struct Transfer {
  int kind, resource, stage, microbatch, chunk;
  int producer, consumer;  // tasks of ops; -1 for none
  int follows;
};

// Groups of equal work: of each item the number of its group, and of each group its first item.
struct Groups {
  Numbers of, first;
};

class Graph {
 public:
  Graph(std::shared_ptr<const Index> index, std::shared_ptr<const Tables> tables, Likeness alike, bool forward_only);

  const Index& index() const { return *index_; }
  const Tables& tables() const { return *tables_; }
  int num_ops() const { return index_->num_ops(); }
  int num_tasks() const { return num_ops() + static_cast<int>(transfers.size()); }
  int num_resources() const { return static_cast<int>(resource_ranks.size()); }
  const TransferRow& row(int task) const { return tables_->rows[transfers[task - num_ops()].kind]; }
  int resource(int task) const {
    return task < num_ops() ? index_->rank[task] : transfers[task - num_ops()].resource;
  }
  const Numbers& ranks(int task) const { return resource_ranks[transfers[task - num_ops()].resource]; }
  // The rank in whose stream a task waits for others.
  int home(int task) const { return task < num_ops() ? index_->rank[task] : ranks(task)[0]; }

  // Making it: as Draft.
  void wait(int task, int before);
  int buffer(const Buffer& made, int writer, int reader = -1, int freed_by = -1);
  void read(int task, int number);
  int transfer(int kind, const Numbers& ranks, int stage, int microbatch, int chunk, int producer, int consumer,
               const Numbers& takes, int follows);
  void activations(int chain);
  void keys_values(int stage, const std::vector<Numbers>& rows, bool blocks);
  void finish();

  std::vector<Buffer> buffers;
  Numbers writer;
  std::vector<Transfer> transfers;
  Numbers takes, gives, saved;  // of ops
  Flags recomputes;             // of ops
  Numbers weights_of, sum_of;   // of ops the number of a transfer, -1 for none
  std::vector<Numbers> resource_ranks;
  Numbers resource_kinds;
  Log reads_made, frees_made;  // what `finish` makes lists of
  Lists successors, writes, reads, frees;
  Numbers waiting;  // of each task, for how many it waits
  Numbers count;    // of transfers by their kind

  // Found once, of a graph that is finished.
  const Groups& tasks_alike() const;       // tasks that take equally long; -1 for those that take no time
  const Groups& sizes_alike() const;       // buffers of one size
  const Groups& workspaces_alike() const;  // ops with workspaces of one size
  // Of these groups, those that are alike to costs: a task or buffer of each, and of each group which it is.
  Groups samples_of_tasks(const Alike& classes) const;
  Groups samples_of_sizes(const Alike& classes) const;
  Groups samples_of_workspaces(const Alike& classes) const;

  bool against_own_order() const;  // whether an op waits for a later one of its rank
  int ended() const;               // tasks that can run to their end
  Numbers unit_order() const;      // as order.unit_order, of the graph so far

 private:
  using TaskKey = std::pair<std::uint64_t, int>;

  std::uint64_t likeness(int kind, int stage, int microbatch, int chunk, const Alike* classes) const;
  TaskKey task_key(int task, const Alike* classes) const;
  TaskKey workspace_key(int task, const Alike* classes) const;
  std::uint64_t size_key(int number, const Alike* classes) const;

  std::shared_ptr<const Index> index_;
  std::shared_ptr<const Tables> tables_;
  Likeness alike_;
  bool forward_only_;
  Log edges_, writes_;
  std::map<std::pair<int, Numbers>, int> resource_numbers_;
  mutable Groups tasks_, sizes_, workspaces_;
};

// As order.TaskTimes.
struct Times {
  Figures start, end;
  Numbers order;
  std::vector<std::pair<int, double>> crowded;

  double makespan() const;
};

// Orders of transfers that are given: by resource; and more tasks that wait for each task.
struct Given {
  std::vector<Numbers> orders;
  Flags in_order;
  Lists waits;
};

Times list_schedule(const Graph& graph, const Figures& durations, const Given* given);

// The order in which transfers that can wait hold up no op, as places.without_holds. rings: whether weights go round.
Numbers without_holds(const Graph& graph, const Times& times, bool rings);

enum Action : char { kRun, kSend, kReceive, kStart, kWait, kFree };

// Each rank's instructions: what to do, and the task.
struct Streams {
  std::vector<std::vector<char>> actions;
  std::vector<Numbers> tasks;
  Numbers openings;
};

Streams project(const Graph& graph, const Times& times, const Numbers& order, const Flags& shipped, int slack);
Given given_by_streams(const Graph& graph, const Streams& streams, const Numbers& order);

// What the sweep has to know of each kind of buffer, as simulate/sweep.py says it.
struct Categories {
  int count, activations, messages, workspace;
  Numbers of;
  Flags given, taken, pooled;  // pooled: of each kind of transfer
};

struct Peak {
  double activations, host, received;
  Figures most;
};

std::vector<Peak> sweep(const Graph& graph, const Streams& streams, const Categories& categories, const Figures& sizes,
                        const Numbers& size_of, const Figures& workspaces, const Numbers& workspace_of);

}  // namespace helixpipe
