// Preloaded (LD_PRELOAD), so that the tests run on Mesa 22.3's Vulkan on the CPU:
//
// - Mesa reads all buffers of a descriptor set, even those that the shader does not use. ggml may have destroyed unused
//   buffers, as Vulkan allows, and then Mesa damages the heap. So buffers are not destroyed; only memory is freed.
// - ggml waits for the end of a graph in a loop, on the CPU that has to compute the graph. So the loop sleeps.
// - Mesa does not count allocated memory. So it is counted here, and reported as drivers of graphics cards do
//   (VK_EXT_memory_budget).
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <vulkan/vulkan.h>

static PFN_vkGetFenceStatus                     fence_status;
static PFN_vkAllocateMemory                     allocate;
static PFN_vkFreeMemory                         release;
static PFN_vkEnumerateDeviceExtensionProperties extensions;
static PFN_vkGetPhysicalDeviceMemoryProperties2 properties;

static VKAPI_ATTR void VKAPI_CALL destroy_buffer(VkDevice device, VkBuffer buffer, const VkAllocationCallbacks * with) {
    (void) device, (void) buffer, (void) with;
}

static VKAPI_ATTR VkResult VKAPI_CALL get_fence_status(VkDevice device, VkFence fence) {
    const VkResult res = fence_status(device, fence);
    if (res == VK_NOT_READY) {
        usleep(20);
    }
    return res;
}

// allocated memory, in no order; Mesa has one heap
static struct piece {
    VkDeviceMemory memory;
    VkDeviceSize   size;
    struct piece * next;
} * pieces;

static VkDeviceSize    n_allocated;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static VKAPI_ATTR VkResult VKAPI_CALL allocate_memory(
        VkDevice device, const VkMemoryAllocateInfo * info, const VkAllocationCallbacks * with, VkDeviceMemory * memory) {
    struct piece * mine = malloc(sizeof(*mine));
    const VkResult res  = mine ? allocate(device, info, with, memory) : VK_ERROR_OUT_OF_HOST_MEMORY;
    if (res != VK_SUCCESS) {
        free(mine);
        return res;
    }
    pthread_mutex_lock(&lock);
    *mine = (struct piece) { *memory, info->allocationSize, pieces };
    pieces = mine;
    n_allocated += mine->size;
    pthread_mutex_unlock(&lock);
    return res;
}

static VKAPI_ATTR void VKAPI_CALL free_memory(VkDevice device, VkDeviceMemory memory, const VkAllocationCallbacks * with) {
    pthread_mutex_lock(&lock);
    for (struct piece ** at = &pieces; *at; at = &(*at)->next) {
        if ((*at)->memory == memory) {
            struct piece * mine = *at;
            n_allocated -= mine->size;
            *at = mine->next;
            free(mine);
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    release(device, memory, with);
}

// Adds VK_EXT_memory_budget to the list. A caller that has asked for the number of extensions has room for it.
static VKAPI_ATTR VkResult VKAPI_CALL enumerate_extensions(
        VkPhysicalDevice device, const char * layer, uint32_t * n, VkExtensionProperties * found) {
    const uint32_t room = *n;
    const VkResult res  = extensions(device, layer, n, found);
    if (res == VK_SUCCESS && (!found || *n < room)) {
        if (found) {
            found[*n] = (VkExtensionProperties) { VK_EXT_MEMORY_BUDGET_EXTENSION_NAME, 1 };
        }
        ++*n;
    }
    return res;
}

static VKAPI_ATTR void VKAPI_CALL get_properties(VkPhysicalDevice device, VkPhysicalDeviceMemoryProperties2 * res) {
    properties(device, res);
    for (VkBaseOutStructure * at = res->pNext; at; at = at->pNext) {
        if (at->sType == VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_BUDGET_PROPERTIES_EXT) {
            VkPhysicalDeviceMemoryBudgetPropertiesEXT * budget = (VkPhysicalDeviceMemoryBudgetPropertiesEXT *) at;
            pthread_mutex_lock(&lock);
            budget->heapBudget[0] = res->memoryProperties.memoryHeaps[0].size;
            budget->heapUsage[0]  = n_allocated;
            pthread_mutex_unlock(&lock);
        }
    }
}

VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL vkGetInstanceProcAddr(VkInstance instance, const char * name) {
    static PFN_vkGetInstanceProcAddr next;
    if (!next) {
        next = (PFN_vkGetInstanceProcAddr) dlsym(dlopen("libvulkan.so.1", RTLD_NOW), "vkGetInstanceProcAddr");
    }
    PFN_vkVoidFunction res = next(instance, name);

    static PFN_vkDestroyBuffer destroy;

    const struct {
        const char *         name;
        PFN_vkVoidFunction   ours;
        PFN_vkVoidFunction * theirs;
    } hooks[] = {
        { "vkDestroyBuffer",                      (PFN_vkVoidFunction) destroy_buffer,       (PFN_vkVoidFunction *) &destroy      },
        { "vkGetFenceStatus",                     (PFN_vkVoidFunction) get_fence_status,     (PFN_vkVoidFunction *) &fence_status },
        { "vkAllocateMemory",                     (PFN_vkVoidFunction) allocate_memory,      (PFN_vkVoidFunction *) &allocate     },
        { "vkFreeMemory",                         (PFN_vkVoidFunction) free_memory,          (PFN_vkVoidFunction *) &release      },
        { "vkEnumerateDeviceExtensionProperties", (PFN_vkVoidFunction) enumerate_extensions, (PFN_vkVoidFunction *) &extensions   },
        { "vkGetPhysicalDeviceMemoryProperties2", (PFN_vkVoidFunction) get_properties,       (PFN_vkVoidFunction *) &properties   },
    };
    for (size_t i = 0; res && i < sizeof(hooks)/sizeof(hooks[0]); ++i) {
        if (!strcmp(name, hooks[i].name)) {
            *hooks[i].theirs = res;
            return hooks[i].ours;
        }
    }
    return res;
}
